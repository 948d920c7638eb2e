"""Sharded JAX training that streams policy versions to rollout fleets and learns from their trajectories."""
