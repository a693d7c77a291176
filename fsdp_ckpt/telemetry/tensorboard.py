"""Events as TensorBoard scalars; the writer is the user's, so nothing is needed here."""

from __future__ import annotations

from typing import Any, Protocol

from fsdp_ckpt.telemetry.event import Event

__all__ = ["TensorBoardEvents"]


class ScalarWriter(Protocol):
    """What is used of a ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any: ...

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> Any: ...


class TensorBoardEvents:
    """For ``CheckpointManager(on_event=TensorBoardEvents(SummaryWriter(...)))``; usually on rank 0 alone.

    Spans become ``checkpoint/<name>_s``, with the rate of those that move bytes beside them; failures,
    rollbacks and the like become texts.

    Args:
        writer: A ``torch.utils.tensorboard.SummaryWriter``, or what has its methods.
        prefix: Of the tags.
    """

    def __init__(self, writer: ScalarWriter, prefix: str = "checkpoint") -> None:
        self._writer = writer
        self._prefix = prefix

    def __call__(self, event: Event) -> None:
        """Take one event."""
        tag = f"{self._prefix}/{event.name}"
        num_bytes = event.fields.get("bytes")
        if event.seconds is not None:
            self._writer.add_scalar(f"{tag}_s", event.seconds, event.step)
            if isinstance(num_bytes, int) and event.seconds > 0:
                rate = num_bytes / event.seconds / 1e9
                self._writer.add_scalar(f"{tag}_GB_per_s", rate, event.step)
        elif event.name == "save.committed" and isinstance(num_bytes, int):
            self._writer.add_scalar(f"{self._prefix}/size_GB", num_bytes / 1e9, event.step)
        elif event.name != "progress":
            text = "; ".join(f"{name}: {value}" for name, value in event.fields.items())
            self._writer.add_text(tag, text or event.name, event.step)
