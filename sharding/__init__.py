"""Sharding of JAX arrays: meshes, rules, inspection, collectives, processes. Needs jax and numpy alone."""
