"""Staging calls on vLLM's worker, reached by `/collective_rpc` (which passes strings only)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_bridge.vllm_plugin import register
from rollout_bridge.vllm_plugin.transfer import MirrorWeightTransferEngine, StageRequest

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

# vLLM imports this module before it creates the engine: a source tree works without an installed entry point.
register()


class MirrorWorkerExtension:
    """Mixed into the worker class by `--worker-extension-cls`; its names must not occur in vLLM's worker."""

    weight_transfer_engine: WeightTransferEngine | None

    def _mirror_engine(self) -> MirrorWeightTransferEngine:
        engine = self.weight_transfer_engine
        if not isinstance(engine, MirrorWeightTransferEngine):
            raise RuntimeError(
                f"weight transfer engine is {type(engine).__name__}, expected MirrorWeightTransferEngine: "
                "start the server with --weight-transfer-config naming the backend of "
                "rollout_bridge.vllm_plugin"
            )
        return engine

    def mirror_stage(self, request: str) -> dict[str, Any]:
        """Begin staging. request: JSON of a `StageRequest`; changed: [names] or null.

        Ends in a file below `reports`: no call has to wait in the engine's loop.
        """
        fields = json.loads(request)
        changed = fields["changed"]
        engine = self._mirror_engine()
        engine.stage(
            StageRequest(
                version=int(fields["version"]),
                mirror=Path(fields["mirror"]),
                changed=None if changed is None else tuple(changed),
                reports=Path(fields["reports"]),
            )
        )
        return engine.stage_status()
