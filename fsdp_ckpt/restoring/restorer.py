"""One restore, from the newest whole checkpoint to the live state.

    find -> compare -> fetch -> (all ranks have theirs) -> deliver -> apply

Invariant: all ranks take the same checkpoint, and leave with the same outcome: before every rank holds its
verified bytes, what has changed of the live state can be put back, and is where one fails.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fsdp_ckpt.commit.branches import BranchHistory
from fsdp_ckpt.commit.catalog import SkippedCheckpoint, step_folder
from fsdp_ckpt.commit.current_branch import CurrentBranch
from fsdp_ckpt.commit.load_cost import keeps_own
from fsdp_ckpt.commit.rollback import history_from_json
from fsdp_ckpt.dcp.load_planner import ReshardLoadPlanner, matches
from fsdp_ckpt.dcp.part_states import PART_CODEC, part_state
from fsdp_ckpt.dcp.reader import Fetched, ShardedStorageReader
from fsdp_ckpt.dcp.saved_state import saved_state
from fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError, NotFoundError
from fsdp_ckpt.manifest.tree import Path, path_name
from fsdp_ckpt.ranks.group import RankGroup
from fsdp_ckpt.restoring.finding import CheckpointFinder
from fsdp_ckpt.restoring.report import Allowed, RestoreReport
from fsdp_ckpt.snapshot.buffer import ImagePool
from fsdp_ckpt.state.saved import RUN_SECTION, RestorePlan, SavedState, subtree
from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.telemetry.restore_trace import RestoreTrace
from fsdp_ckpt.telemetry.tracing import OFF, Telemetry
from fsdp_ckpt.uncollected import uncollected

if TYPE_CHECKING:
    from fsdp_ckpt.state.train_state import TrainState

__all__ = ["Restorer"]

logger = logging.getLogger("fsdp_ckpt")

MAX_GONE = 10


class Restorer:
    """Restores from one root.

    Args:
        root: The run's root.
        group: The ranks.
        options: For the reader's filesystem.
        pool: Of buffers to read into.
        branch: On which this job saves; used on the coordinator.
        num_threads: Reads in flight, per rank.
        telemetry: Is told of each restore.
    """

    def __init__(
        self,
        root: Store,
        group: RankGroup,
        options: Mapping[str, Any],
        pool: ImagePool,
        branch: CurrentBranch,
        *,
        num_threads: int | None,
        telemetry: Telemetry = OFF,
    ) -> None:
        self._root = root
        self._telemetry = telemetry
        self._branch = branch
        self._finder = CheckpointFinder(root, branch)
        self.mark_corrupt = self._finder.mark_corrupt  # on the coordinator
        self._group = group
        self._options = dict(options)
        self._pool = pool
        self._num_threads = num_threads
        self.history = BranchHistory()  # as of the last restore, on every rank

    def restore(
        self,
        state: TrainState,
        step: int | None,
        allowed: Allowed,
        *,
        from_memory: bool = False,
    ) -> RestoreReport:
        """Bring the live state back; called by every rank.

        Args:
            state: What is restored.
            step: The checkpoint; ``None`` for the newest that is whole.
            allowed: What may be passed over.
            from_memory: Take what a save of this process has left in host memory from there.

        Raises:
            CheckpointError: See :meth:`fsdp_ckpt.CheckpointManager.restore`.
        """
        damaged: dict[tuple[int, str], str] = {}
        gone, is_first = 0, self._group.is_coordinator
        while True:
            trace = self._telemetry.restore()
            found = self._group.coordinate(
                "looking for a checkpoint", lambda: self._finder.choose(step, damaged, allowed)
            )
            skipped = tuple(SkippedCheckpoint(**s) for s in found["skipped"])
            self.history = history_from_json(found["rollbacks"])
            trace.found(found["step"], found["attempt"] if found["step"] is not None else None)
            if found["step"] is None:
                self._say(skipped, f"no checkpoint under {self._root.url}: starting fresh")
                trace.done(skipped, is_coordinator=is_first)
                return RestoreReport(step=None, skipped=skipped)
            try:
                restore = _Restore(
                    self,
                    found["step"],
                    found["attempt"],
                    allowed,
                    trace,
                    from_memory=from_memory,
                )
                with uncollected():
                    report = restore.run(state)
            except CorruptCheckpointError as e:
                trace.failed(e)
                if step is not None:
                    raise
                damaged[found["step"], found["attempt"]] = str(e)
                continue
            except NotFoundError:
                # Taken away since it was found, by another job.
                gone += 1
                if step is not None or gone > MAX_GONE:
                    raise
                continue
            self._branch.stands_on(found["step"], found["attempt"], is_newest=found["is_newest"])
            held = report.num_bytes_from_memory
            where = f"{held} bytes of it from host memory, the rest " if held else ""
            self._say(skipped, f"restored step {report.step}, {where}from {self._root.url}")
            trace.done(skipped, is_coordinator=is_first, from_memory=held)
            return dataclasses.replace(report, skipped=skipped)

    def _say(self, skipped: Iterable[SkippedCheckpoint], outcome: str) -> None:
        if self._group.is_coordinator:
            for s in skipped:
                logger.warning("passed over the checkpoint of step %d: %s", s.step, s.reason)
            logger.warning(outcome)


class _Restore:
    """One try to restore one checkpoint."""

    def __init__(
        self,
        restorer: Restorer,
        step: int,
        attempt: str,
        allowed: Allowed,
        trace: RestoreTrace,
        *,
        from_memory: bool,
    ) -> None:
        self._trace = trace
        self._group = restorer._group
        self._step, self._attempt, self._allowed = step, attempt, allowed
        self._from_memory = from_memory
        self._reader = ShardedStorageReader(
            restorer._root.child(step_folder(step)),
            num_threads=restorer._num_threads,
            pool=restorer._pool,
            **restorer._options,
        )
        # A rank's own random states stay its own on another world size too.
        self._reader.set_up(
            rank=self._group.rank,
            world_size=self._group.world_size,
            keep_own=keeps_own,
        )
        self._planner = ReshardLoadPlanner(
            allow_missing=allowed.missing,
            allow_unexpected=allowed.unexpected,
            allow_cast=allowed.cast,
        )
        self._leaves: dict[Path, Any] = {}
        self._run: Mapping[str, Any] = {}

    def run(self, state: TrainState) -> RestoreReport:
        """Compare, fetch, deliver, apply; every step agreed by all ranks."""
        try:
            saved, plan = self._agree_on_plan(state)
            self._trace.lap("compare")
            fetched = self._group.run("reading the checkpoint", lambda: self._fetch(state, plan))
            self._trace.lap("agree")
            self._apply(state, plan, saved, fetched)
            self._trace.lap("apply")
        except BaseException:
            self._reader.undo()
            raise
        finally:
            self._reader.release()
        return self._report(plan, saved)

    def _agree_on_plan(self, state: TrainState) -> tuple[SavedState, RestorePlan]:
        group, planner = self._group, self._planner
        compared: list[tuple[SavedState, RestorePlan]] = []

        def compare() -> list[str]:
            compared.append(self._compare(state))
            return planner.unclaimed

        unclaimed = group.common("comparing the checkpoint", compare)
        ((saved, plan),) = compared
        group.run("comparing the checkpoint", lambda: planner.judge(unclaimed))
        self._share_out(state, plan, saved)
        return saved, plan

    def _apply(
        self, state: TrainState, plan: RestorePlan, saved: SavedState, fetched: Fetched
    ) -> None:
        group = self._group
        try:
            group.run("restoring the state", lambda: state.apply_plain_parts(plan, self._leaves))
        except CheckpointError:
            state.undo_plain_parts()
            raise

        def apply() -> None:
            self._reader.deliver_tensors(fetched, self._planner)
            state.apply(plan, self._leaves, saved.seed, group.rank)

        group.run("restoring the state", apply)
        # Only now: it may gather, and a rank that had failed would be waited for.
        group.run("refreshing what follows from the state", lambda: state.refresh(plan))

    def _compare(self, state: TrainState) -> tuple[SavedState, RestorePlan]:
        manifest = self._reader.checkpoint.manifest
        if manifest.attempt != self._attempt:
            raise CorruptCheckpointError(
                f"step {self._step}: attempt {self._attempt} was found, {manifest.attempt} is there now",
                step=self._step,
            )
        if not self._from_memory:
            # Before any rank begins to keep the store busy.
            self._reader.open_own_file()
        saved = saved_state(manifest)
        plan = state.plan_restore(
            saved,
            rank=self._group.rank,
            world_size=self._group.world_size,
            allowed=lambda name: matches(name, self._allowed.missing),
        )
        # What the run knew of itself is no part of the live state.
        self._run = subtree(saved.values, RUN_SECTION) or {}
        plan.left_out.extend(saved.under(RUN_SECTION))
        self._leaves = dict(plan.leaves)
        self._planner.set_up(
            self._leaves,
            manifest,
            rank=self._group.rank,
            put=self._leaves.__setitem__,
            missing=plan.missing,
            problems=plan.problems,
            left_out=plan.left_out,
        )
        if self._planner.fits_alone and not self._from_memory:
            self._reader.read_ahead()
        return saved, plan

    def _share_out(self, state: TrainState, plan: RestorePlan, saved: SavedState) -> None:
        """Let the caller's functions turn the per-rank states that were saved into today's."""
        group, checkpoint = self._group, self._reader.checkpoint
        for name in plan.resharded:
            prefix = name.split(".", 1)

            def read(prefix: list[str] = prefix, name: str = name) -> list[Any]:
                ranks = range(saved.world_size)
                return [PART_CODEC.encode(part_state(checkpoint, r, *prefix), name) for r in ranks]

            encoded = group.coordinate(f"reading the states of {name}", read)
            states = [PART_CODEC.decode(s) for s in encoded]

            def reshard(name: str = name, states: list[Any] = states) -> Any:
                return state.reshard[name](states, rank=group.rank, world_size=group.world_size)

            plan.resharded[name] = group.run(f"sharing out {name}", reshard)

    def _fetch(self, state: TrainState, plan: RestorePlan) -> Fetched:
        if not self._from_memory:
            self._reader.read_ahead()
        fetched = self._reader.fetch(
            self._planner.create_local_plan(), self._planner, from_memory=self._from_memory
        )
        absent = frozenset(fetched.absent)
        for path in list(self._leaves):
            if not self._planner.is_loaded(path) or path_name(path) in absent:
                del self._leaves[path]
        self._reader.deliver_values(fetched, self._planner)  # into the leaves: nothing live
        state.check(plan, self._leaves)
        self._trace.lap("read")
        return fetched

    def _report(self, plan: RestorePlan, saved: SavedState) -> RestoreReport:
        differences = self._planner.differences
        parts = {".".join(p[:2]) if p[0] == "extra" else p[0] for p in self._leaves}
        return RestoreReport(
            step=self._step,
            attempt=self._attempt,
            saved_world_size=saved.world_size,
            preserved=tuple(sorted(parts - {"tied", *plan.derived})),
            derived=tuple(plan.derived),
            dropped=tuple(plan.dropped),
            missing=tuple(differences.missing),
            unexpected=tuple(differences.unexpected),
            cast=dict(differences.cast),
            run=self._run,
            num_bytes_from_memory=self._reader.num_bytes_held,
        )
