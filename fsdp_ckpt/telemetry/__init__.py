"""What a run tells of its saves and restores: spans and events, beside the run and to a callback.

    training, copy, commit threads ──Event──> queue ──> one thread ─┬─> lines under ROOT/telemetry/
                                                                    └─> callback: TensorBoard, Prometheus

Invariant: nothing here holds training up, and nothing that fails here fails a save. Loads no torch.
"""

from __future__ import annotations

from fsdp_ckpt.telemetry.event import Event
from fsdp_ckpt.telemetry.options import TelemetryOptions
from fsdp_ckpt.telemetry.prometheus import PrometheusEvents
from fsdp_ckpt.telemetry.tensorboard import TensorBoardEvents

__all__ = ["Event", "PrometheusEvents", "TelemetryOptions", "TensorBoardEvents"]
