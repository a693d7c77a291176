"""Going back in place: onto the record first, then into the live state.

    finish what is under way ──> choose the newest good ──> record (durable) ──> restore ──┬─> go on
                                     └───────────────── damaged: further back ─────────────┘

What this process saved and has not saved over since is still in host memory, and comes back from there.

Invariant: nothing live changes before the record is durable; whatever dies afterwards comes back to the
branch that it names, with the data to skip and the learning rate that it holds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fsdp_ckpt.commit.branches import BranchHistory, DataWindow, merge_windows
from fsdp_ckpt.commit.current_branch import CurrentBranch
from fsdp_ckpt.commit.good import find_good, find_target
from fsdp_ckpt.errors import CorruptCheckpointError, NotFoundError, RunStoppedError
from fsdp_ckpt.life.housekeeping import Housekeeper
from fsdp_ckpt.life.watching import RunWatch
from fsdp_ckpt.ranks.group import RankGroup
from fsdp_ckpt.restoring.report import Allowed, RestoreReport
from fsdp_ckpt.restoring.restorer import Restorer
from fsdp_ckpt.saving.saver import Saver
from fsdp_ckpt.stability.spike_policy import SpikeDecision
from fsdp_ckpt.storage.store import Store

if TYPE_CHECKING:
    from fsdp_ckpt.state.train_state import TrainState

__all__ = ["WayBack"]

logger = logging.getLogger("fsdp_ckpt")

MAX_TARGETS = 10
NOTHING = Allowed(missing=(), unexpected=(), cast=False, torn=False)


class WayBack:
    """Takes a run back to its newest good checkpoint; every rank has one.

    Args:
        root: The run's root.
        state: What is restored.
        group: The ranks.
        saver: Whose saves have to end first.
        restorer: Restores.
        branch: Takes the record; on the coordinator.
        keeper: Whose deletions have to end first.
        watch: Knows what is good; on the coordinator.
    """

    def __init__(
        self,
        root: Store,
        state: TrainState,
        group: RankGroup,
        saver: Saver,
        restorer: Restorer,
        branch: CurrentBranch,
        keeper: Housekeeper,
        watch: RunWatch,
    ) -> None:
        self._root = root
        self._state = state
        self._group = group
        self._saver = saver
        self._restorer = restorer
        self._branch = branch
        self._keeper = keeper
        self._watch = watch
        self._looked_for: BranchHistory | None = None

    def num_rollbacks(self) -> int:
        """Return how often the run has gone back at the place where it is; on the coordinator."""
        history = self._branch.history
        if not history.rollbacks:
            return 0
        if self._looked_for is not history:
            self._looked_for = history
            found = find_good(self._root, history, self._watch.good)
            if found is not None:
                self._watch.good[found.attempt] = found.step
        newest_good = max(self._watch.good.values(), default=0)
        return history.num_in_a_row() if newest_good < history.furthest_step else 0

    def go(
        self, spike: SpikeDecision, first: int, windows: Sequence[tuple[int, int, int]]
    ) -> RestoreReport:
        """Go back; called by every rank.

        Args:
            spike: Why.
            first: First step that went wrong.
            windows: Data to skip from then on: (epoch, start, stop).

        Raises:
            NotFoundError: There is no checkpoint to go back to.
            RunStoppedError: Many were tried, and all are damaged.
        """
        # A save under way is of the branch that is left, and must not be published after the record.
        self._saver.finish()
        self._keeper.finish()  # it might be deleting what the run goes back to
        skip = merge_windows(DataWindow(epoch=e, start=a, stop=b) for e, a, b in windows)
        unusable: set[str] = set()
        for _ in range(MAX_TARGETS):
            target = self._group.coordinate(
                "going back", lambda: self._record(spike, first, skip, unusable)
            )
            try:
                report = self._restorer.restore(
                    self._state, target["step"], NOTHING, from_memory=True
                )
            except (CorruptCheckpointError, NotFoundError) as e:
                unusable.add(target["attempt"])
                if self._group.is_coordinator:
                    logger.warning("could not go back to step %d: %s", target["step"], e)
                    self._restorer.mark_corrupt(target["step"], target["attempt"], str(e))
                continue
            if self._state.optimizer is not None:
                self._state.optimizer.zero_grad()  # of a step on the branch that was left
            return report
        raise RunStoppedError(
            f"{self._root.url}: {MAX_TARGETS} checkpoints could not be gone back to: {spike.reason}",
            step=spike.step,
        )

    def _record(
        self, spike: SpikeDecision, first: int, skip: Sequence[DataWindow], unusable: set[str]
    ) -> dict[str, Any]:
        """Choose where to go back to, and put it on record."""
        step = self._state.progress.step
        self._branch.settle(step)
        target = find_target(
            self._root,
            self._branch.history,
            known=self._watch.good,
            below=first,
            at_most=step,
            unusable=unusable,
        )
        if target is None:
            raise NotFoundError(
                f"{self._root.url}: no checkpoint to go back to from step {spike.step}: {spike.reason}; "
                "start anew, with other data or a lower learning rate",
                step=spike.step,
            )
        self._branch.roll_back(
            from_step=step,
            to_step=target.step,
            attempt=target.attempt,
            reason=spike.reason,
            skip=skip,
            lr_factor=spike.lr_factor,
            lr_steps=spike.lr_steps,
        )
        return {"step": target.step, "attempt": target.attempt}
