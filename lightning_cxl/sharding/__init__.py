"""Several processes: units sharded with FSDP2, and what the rest of the package sees of them."""
