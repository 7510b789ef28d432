"""`export`: checkpoints of any front end as folders for transformers, or as adapters."""
