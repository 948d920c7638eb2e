"""vLLM plugin: weights straight from a mirror directory on the same host, without jax.

Entry point (group `vllm.general_plugins`): `rollout_bridge = rollout_bridge.vllm_plugin:register`.
vLLM calls it in every process it starts; the engine itself is imported only in the workers.
"""

from __future__ import annotations

BACKEND = "rollout_bridge_mirror"
"""Name of the weight transfer backend, for `--weight-transfer-config '{"backend": ...}'`."""

WORKER_EXTENSION = "rollout_bridge.vllm_plugin.worker.MirrorWorkerExtension"
"""Value of `--worker-extension-cls`: staging calls that run outside an update session."""


def register() -> None:
    """Make the backend known to vLLM. Calling it again in the same process changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from rollout_bridge.vllm_plugin.pauses import answer_when_stopped
    from rollout_bridge.vllm_plugin.queues import wait_without_spinning

    wait_without_spinning()
    answer_when_stopped()

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rollout_bridge.vllm_plugin.transfer", "MirrorWeightTransferEngine"
        )
