"""Which tensors are quantised, how, and what proves two copies equal; the JAX half is in `device`."""
