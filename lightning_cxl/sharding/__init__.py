"""Several processes that train one model: process groups, and sharding with FSDP2."""
