"""Several processes: FSDP2 cuts the model, and each process keeps its shards on its tiers."""
