"""Several processes that train one model: how they meet, and how FSDP2 cuts the model over them."""
