"""What is done about committed checkpoints behind training's back: marks, and deleting the old ones.

    committed ──> scored ──> good, once training went on well ──> what the policy does not keep is deleted

Invariant: it runs on the coordinator, one thing after the other, only ever after a commit; what fails here is
logged and tried again after the next one, and never fails a save.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from fsdp_ckpt.commit.catalog import CheckpointInfo
from fsdp_ckpt.commit.marks import add_mark
from fsdp_ckpt.commit.prune import prune
from fsdp_ckpt.commit.retention import RetentionPolicy
from fsdp_ckpt.errors import describe
from fsdp_ckpt.stability.health import Candidate
from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.telemetry.tracing import OFF, Telemetry

__all__ = ["Housekeeper"]

logger = logging.getLogger("fsdp_ckpt")


class Housekeeper:
    """Looks after the checkpoints of one root.

    Args:
        root: The run's root.
        keep: What to keep; ``None`` deletes nothing.
        is_judged: Whether the run finds out which checkpoints are good.
        telemetry: Is told of deletions.
    """

    def __init__(
        self,
        root: Store,
        keep: RetentionPolicy | None,
        *,
        is_judged: bool,
        telemetry: Telemetry = OFF,
    ) -> None:
        self._telemetry = telemetry
        self._root = root
        self._is_judged = is_judged
        self._keep = keep
        self._worker = ThreadPoolExecutor(1, "fsdp_ckpt-keep")
        self._lock = threading.Lock()
        self._committed: set[str] = set()
        self._good: dict[str, int] = {}  # attempt -> step, judged before it was committed
        self._is_prune_due = False
        self.resumed_from: str | None = None

    def committed(self, info: CheckpointInfo, metrics: Mapping[str, float]) -> None:
        """Take note of a checkpoint that is there; any thread may call it."""
        with self._lock:
            self._committed.add(info.attempt)
            is_good = self._good.pop(info.attempt, None) is not None
        if metrics:
            self._do(partial(self._mark, info.step, info.attempt, "scored", metrics=metrics))
        if is_good:
            self._do(partial(self._mark, info.step, info.attempt, "good"))
        with self._lock:
            is_due, self._is_prune_due = not self._is_prune_due, True
        if self._keep is not None and is_due:
            self._do(self._prune)

    def resumed(self, step: int, attempt: str) -> None:
        """Take note of the checkpoint that the run goes on from."""
        self.resumed_from = attempt
        with self._lock:
            self._committed.add(attempt)

    def good(self, candidate: Candidate) -> None:
        """Mark a checkpoint as good, as soon as it is committed."""
        with self._lock:
            if candidate.attempt not in self._committed:
                self._good[candidate.attempt] = candidate.step
                return
        self._do(partial(self._mark, candidate.step, candidate.attempt, "good"))

    def _mark(
        self, step: int, attempt: str, kind: str, metrics: Mapping[str, float] | None = None
    ) -> None:
        add_mark(self._root, step, attempt, kind, metrics=metrics)  # type: ignore[arg-type]

    def _prune(self) -> None:
        with self._lock:
            self._is_prune_due = False  # what is committed from here on asks for another one
        if self._keep is not None:
            plan = prune(
                self._root, self._keep, resumed_from=self.resumed_from, is_judged=self._is_judged
            )
            for doomed in plan.delete:
                self._telemetry.event(
                    "retention.deleted",
                    step=doomed.step,
                    attempt=doomed.attempt,
                    what=doomed.what,
                    bytes=doomed.num_bytes,
                    reason=doomed.reason,
                )
            if plan.delete:
                steps = ", ".join(str(doomed.step) for doomed in plan.delete)
                logger.info("deleted what the policy does not keep: step %s", steps)

    def _do(self, action: Callable[[], None]) -> None:
        def run() -> None:
            try:
                action()
            except Exception as e:
                logger.warning("could not look after the checkpoints now: %s", describe(e))

        self._worker.submit(run)

    def finish(self) -> None:
        """Return when everything that was asked for has been done or has failed."""
        self._worker.submit(int).result()

    def close(self) -> None:
        """Finish, and end the thread."""
        self._worker.shutdown()
