"""`jaxtrain serve`: a vLLM server that follows the run's policy."""

from __future__ import annotations

from jaxtrain.commands.common import ConfigPath, Name, Overrides, load_async, log_to_stderr, naming
from jaxtrain.commands.lifetime import follow_parent


def serve(config: ConfigPath, name: Name = None, overrides: Overrides = None) -> None:
    """Run a vLLM server on this host and keep it at the newest policy version.

    Waits for the run's first version, starts the server from it, and updates it in flight from then on. The
    server listens on loopback only. Needs vLLM: `make vllm`, or requirements/README.md.
    """
    experiment = load_async(config, name, overrides)
    log_to_stderr()
    follow_parent()
