"""Events as Prometheus metrics, in the text format that its collectors read.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/, text-based format.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping

from fsdp_ckpt.telemetry.event import Event

__all__ = ["PrometheusEvents"]

_COUNTED = {
    "save.committed": "fsdp_ckpt_saves_committed_total",
    "save.failed": "fsdp_ckpt_saves_failed_total",
    "save.skipped": "fsdp_ckpt_saves_skipped_total",
    "save.retried": "fsdp_ckpt_saves_retried_total",
    "restore.done": "fsdp_ckpt_restores_total",
    "restore.passed_over": "fsdp_ckpt_checkpoints_passed_over_total",
    "rollback": "fsdp_ckpt_rollbacks_total",
    "spike": "fsdp_ckpt_spikes_total",
    "preemption": "fsdp_ckpt_preemptions_total",
    "retention.deleted": "fsdp_ckpt_checkpoints_deleted_total",
}
_HELP = {
    "fsdp_ckpt_span_seconds": "Time spent in each phase of saves and restores.",
    "fsdp_ckpt_last_saved_step": "Step of the newest committed checkpoint.",
    "fsdp_ckpt_last_saved_timestamp_seconds": "When it was committed, in seconds since 1970.",
    "fsdp_ckpt_last_saved_bytes": "Its size over all ranks.",
    "fsdp_ckpt_step": "Step that the run is at.",
}


class PrometheusEvents:
    """For ``CheckpointManager(on_event=PrometheusEvents(...))``: one rank's metrics.

    Args:
        path: A file that the node exporter's textfile collector reads, written anew when a save, a restore or
            something out of the ordinary has ended; ``None`` for :meth:`text` alone.
        labels: Of every metric, such as ``{"run": "17"}``; the rank is one by itself.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._path = None if path is None else os.fspath(path)
        self._labels = dict(labels or {})
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTED.values(), 0)
        self._spans: dict[str, tuple[int, float]] = {}  # name -> how often, seconds
        self._gauges: dict[str, float] = {}
        self._rank = 0

    def __call__(self, event: Event) -> None:
        """Take one event."""
        with self._lock:
            self._take(event)
        if self._path is not None and (event.name in _COUNTED or event.name == "run.ended"):
            # Whole or not at all: the collector may read at any moment.
            temporary = f"{self._path}.{os.getpid()}.tmp"
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(self.text())
            os.replace(temporary, self._path)

    def _take(self, event: Event) -> None:
        self._rank = event.rank
        if event.name in _COUNTED:
            self._counts[_COUNTED[event.name]] += 1
        if event.seconds is not None:
            number, seconds = self._spans.get(event.name, (0, 0.0))
            self._spans[event.name] = (number + 1, seconds + event.seconds)
        if event.name == "save.committed" and event.step is not None:
            self._gauges["fsdp_ckpt_last_saved_step"] = event.step
            self._gauges["fsdp_ckpt_last_saved_timestamp_seconds"] = event.wall_s
            if isinstance(num_bytes := event.fields.get("bytes"), int):
                self._gauges["fsdp_ckpt_last_saved_bytes"] = num_bytes
        if event.step is not None and event.name != "restore.passed_over":
            self._gauges["fsdp_ckpt_step"] = event.step

    def text(self) -> str:
        """Return all metrics as text; any thread may call it."""
        with self._lock:
            return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        for name, count in self._counts.items():
            yield f"# TYPE {name} counter"
            yield f"{name}{self._shown()} {count}"
        for name, value in self._gauges.items():
            yield f"# HELP {name} {_HELP[name]}"
            yield f"# TYPE {name} gauge"
            yield f"{name}{self._shown()} {value!r}"
        if self._spans:
            name = "fsdp_ckpt_span_seconds"
            yield f"# HELP {name} {_HELP[name]}"
            yield f"# TYPE {name} summary"
            for span, (number, seconds) in sorted(self._spans.items()):
                yield f"{name}_sum{self._shown(span=span)} {seconds!r}"
                yield f"{name}_count{self._shown(span=span)} {number}"

    def _shown(self, **more: str) -> str:
        labels = {**self._labels, "rank": str(self._rank), **more}
        return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
