"""Typed experiment configuration: `schema` defines it, `load` reads YAML and overrides into it."""
