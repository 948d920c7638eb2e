"""Our parameter tree <-> Hugging Face tensor names and layouts; one file an architecture."""

from rollout_bridge.names.base import NamesError, TensorSource
from rollout_bridge.names.registry import architecture, duplicates, from_tree, tensors, to_tree

__all__ = ["NamesError", "TensorSource", "architecture", "duplicates", "from_tree", "tensors", "to_tree"]
