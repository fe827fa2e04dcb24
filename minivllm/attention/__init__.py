"""How K and V are read: the pool, the batch, and readers behind transformers' interface."""
