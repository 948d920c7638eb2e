"""`jaxtrain serve`: a vLLM server that follows the run's policy."""

from __future__ import annotations

from importlib.util import find_spec

from jaxtrain.commands.common import ConfigPath, Name, Overrides, fail, load_async, log_to_stderr, naming
from rollout_bridge.lifetime import follow_parent


def serve(config: ConfigPath, name: Name = None, overrides: Overrides = None) -> None:
    """Run a vLLM server on this host and keep it at the newest policy version.

    Waits for the run's first version, starts the server from it, and updates it in flight from then on. The
    server listens on loopback only. Needs vLLM: `make vllm`, or requirements/README.md.
    """
    experiment = load_async(config, name, overrides, fleet=True)
    if find_spec("vllm") is None:
        fail("jaxtrain serve: vLLM is not installed. Run `make vllm`, or see requirements/README.md")
    log_to_stderr()
    follow_parent()

    from jaxtrain.commands.fleet import serve_settings, serving_agent
    from rollout_bridge.serve import serve as run_server

    with naming():
        run_server(serve_settings(experiment, agent_id=serving_agent(experiment)))
