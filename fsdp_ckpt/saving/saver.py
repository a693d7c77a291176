"""One save, from live state to a snapshot in host memory, and on to a committed checkpoint.

    collect -> agree -> image with header -> copy of the tensors ──> writer ──> (all receipts) -> publish
    └──────────────── training waits ───────────────┘               └───────── in the background ──────┘

Invariant: nothing of the live state changes; all ranks take the same decisions at the same call, also when
only one of them knows of an earlier failure or has no free image; a failure on any rank fails the save on all
of them with nothing committed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fsdp_ckpt.commit.catalog import CheckpointInfo, SkippedCheckpoint, step_folder
from fsdp_ckpt.commit.current_branch import CurrentBranch
from fsdp_ckpt.commit.fence import pass_fence
from fsdp_ckpt.commit.publish import (
    new_attempt,
    publish_manifest,
    refuse_committed,
    retire_manifest,
)
from fsdp_ckpt.commit.receipt import Attempt, ShardReceipt, seal
from fsdp_ckpt.dcp.save_planner import ShardSavePlanner
from fsdp_ckpt.dcp.shard_image import ShardImage
from fsdp_ckpt.errors import AlreadyCommittedError, IncompleteWriteError
from fsdp_ckpt.manifest.schema import Manifest
from fsdp_ckpt.options import SaveMode, SaveOptions
from fsdp_ckpt.ranks.group import RankGroup
from fsdp_ckpt.saving.agreeing import Agreeing
from fsdp_ckpt.saving.handle import SaveHandle
from fsdp_ckpt.saving.notes import SaveNotes, with_facts
from fsdp_ckpt.saving.persisting import Persister
from fsdp_ckpt.saving.replicas import CheckReplicas, check_replicas
from fsdp_ckpt.saving.staging import ImagePlace, Stager
from fsdp_ckpt.snapshot.buffer import ImagePool
from fsdp_ckpt.state.names import changes_in_step
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.store import Store
from fsdp_ckpt.telemetry.save_trace import SaveTrace
from fsdp_ckpt.telemetry.tracing import OFF, Telemetry
from fsdp_ckpt.uncollected import uncollected

if TYPE_CHECKING:
    from fsdp_ckpt.state.train_state import TrainState

__all__ = ["Saver"]


class Saver:
    """Saves under one root, again and again: plan, buffers and writer are kept between saves.

    Args:
        root: The run's root.
        group: The ranks; a second group, with a connection of its own, serves the background.
        background: That second group.
        options: How a save goes.
        pool: Of buffers for images.
        branch: On which this job saves; used on the coordinator.
        address: Url and storage options with which another process opens the root; ``None`` if none can.
        num_threads: Threads that write, per rank.
        check: What to do about replicas that are not equal; ``None`` warns, where looking costs little.
        telemetry: Is told of each save.
    """

    def __init__(
        self,
        root: Store,
        group: RankGroup,
        background: RankGroup,
        options: SaveOptions,
        pool: ImagePool,
        branch: CurrentBranch,
        *,
        address: Mapping[str, Any] | None,
        num_threads: int | None,
        check: CheckReplicas | None,
        telemetry: Telemetry = OFF,
    ) -> None:
        self._root = root
        self._branch = branch
        self._group = group
        self._options = options
        self._check = check
        self._telemetry = telemetry
        self._planner = ShardSavePlanner()
        self._agreeing = Agreeing(group, self._planner)
        self._named: tuple[str, frozenset[str]] = "", frozenset()  # parameters of a structure
        self._persister = Persister(background, group.timeout_s)
        self._stager = Stager(
            root, self._persister, options, pool, address=address, num_threads=num_threads
        )
        self._stager.held = telemetry.held
        # By the save's number, which is the same on all ranks.
        self._handles: dict[int, SaveHandle] = {}
        self._num_saves = 0

    # --- the call ---

    def save(
        self,
        state: TrainState,
        mode: SaveMode,
        replaces: SkippedCheckpoint | None,
        notes: SaveNotes | None = None,
    ) -> SaveHandle:
        """Save the state as the checkpoint of its step; called by every rank.

        Args:
            state: What is saved.
            mode: When to return.
            replaces: The step's checkpoint as it was found damaged, which may be replaced.
            notes: What goes along, on the coordinator.

        Raises:
            CheckpointError: See :meth:`fsdp_ckpt.CheckpointManager.save`.
        """
        trace = self._telemetry.save(state.progress.step, mode)
        with uncollected():
            handle = self._begin(state, mode, replaces, notes, trace)
        if mode == "sync":
            handle.wait()
        trace.returned()
        return handle

    def _begin(
        self,
        state: TrainState,
        mode: SaveMode,
        replaces: SkippedCheckpoint | None,
        notes: SaveNotes | None,
        trace: SaveTrace,
    ) -> SaveHandle:
        """Take the snapshot, and send it on its way."""
        self._stager.wait_staged()
        # Failed ones stay, also reported ones: another rank may still name them.
        self._handles = {n: h for n, h in self._handles.items() if not h.has_succeeded}
        step, timeout_s = state.progress.step, self._group.timeout_s
        with self._stager.take_image(self._options.on_busy, timeout_s) as place:
            trace.has_place()
            self._stager.open_early(place, mode)
            try:
                attempt = self._decide(state, mode, place, replaces)
                if attempt is None:
                    self._planner.forget()
                    trace.skipped()
                    return SaveHandle(step, timeout_s, is_skipped=True)
                parameters = self._parameter_names(state)
                check_replicas(self._planner, self._group, self._check, parameters)
            except BaseException as e:
                self._planner.forget()
                trace.refused(e)
                raise
            trace.planned(attempt.id)
            manifest = self._planner.draft_manifest()
            snapshot = self._stager.stage(
                place,
                trace.imaged(
                    lambda pool, head_start: ShardImage.begin(
                        with_facts(self._planner.contents(), notes),
                        attempt,
                        self._group.rank,
                        pool,
                        manifest=manifest if self._group.is_coordinator else None,
                        head_start=head_start,
                        digesting=mode != "lazy",
                    )
                ),
                folder=step_folder(step),
                mode=mode,
                is_late=lambda entry: changes_in_step(entry.name, parameters),
                forget=trace.copied(self._planner.forget),
            )
        committed = self._persister.submit(
            step,
            snapshot.write,
            snapshot.receipt,
            trace.publishing(self._publisher(manifest, attempt, replaces)),
        )
        trace.follow(snapshot.write, committed)
        if notes is not None:
            notes.follow(attempt, committed)
        handle = SaveHandle(step, timeout_s, snapshot.staged, committed)
        self._handles[self._num_saves] = handle
        self._num_saves += 1
        return handle

    def _parameter_names(self, state: TrainState) -> frozenset[str]:
        if self._named[0] != self._planner.structure:
            self._named = self._planner.structure, state.parameter_names()
        return self._named[1]

    def _publisher(
        self, draft: Manifest, attempt: Attempt, replaces: SkippedCheckpoint | None
    ) -> Callable[[list[Any]], dict[str, Any]]:
        store = self._root.child(step_folder(attempt.step))

        def publish(receipts: list[Any]) -> dict[str, Any]:
            manifest = seal(draft, attempt, [ShardReceipt.from_json(r) for r in receipts])
            manifest.check()
            pass_fence(self._root, attempt.id)
            self._branch.check_publish(attempt, store)
            if replaces is not None:
                retire_manifest(store, replaces.attempt)
            publish_manifest(store, manifest)
            return dataclasses.asdict(CheckpointInfo.of(manifest, store.url))

        return publish

    # --- what is under way ---

    @property
    def writer_pid(self) -> int | None:
        """Process id of the writer process, once it has been started."""
        return self._persister.writer_pid

    def finish(self) -> None:
        """Return when nothing is under way, however it ended."""
        self._stager.wait_staged()
        self._persister.finish()

    def close(self) -> None:
        """Finish, release buffers, threads and the writer process.

        Raises:
            CheckpointError: A save failed that no call has reported yet.
        """
        self.finish()
        self._persister.close()
        self._stager.close()
        self._planner.forget()
        for handle in self._handles.values():
            if not handle.is_reported and handle.has_failed:
                handle.wait()

    # --- the decision ---

    def _decide(
        self,
        state: TrainState,
        mode: SaveMode,
        place: ImagePlace,
        replaces: SkippedCheckpoint | None,
    ) -> Attempt | None:
        """Collect the state, and agree on everything; one exchange, usually. ``None``: skip this save."""
        group, planner, step = self._group, self._planner, state.progress.step

        def look() -> dict[str, Any]:
            handles = self._handles.items()
            planner.set_up(state.collect(), rank=group.rank, world_size=group.world_size)
            # Known from here on, so that nothing fails after this exchange.
            self._parameter_names(state)
            return {
                "print": [step, planner.structure, planner.content()],
                "failed": next((n for n, h in handles if h.has_failed and not h.is_reported), None),
                "again": any(h.step == step and not h.has_failed for _, h in handles),
                "busy": not place.is_free,
            }

        def combine(votes: list[dict[str, Any]]) -> dict[str, Any]:
            known = [vote["failed"] for vote in votes if vote["failed"] is not None]
            if not known and any(vote["again"] for vote in votes):
                raise AlreadyCommittedError(f"step {step} is being saved already", step=step)
            answer = {
                "failed": min(known, default=None),
                "busy": [rank for rank, vote in enumerate(votes) if vote["busy"]],
                "equal": all(vote["print"] == votes[0]["print"] for vote in votes),
                "attempt": new_attempt(),
                "generation": 0,
            }
            # A look at a disk is cheap. A remote store is asked where training waits anyway; otherwise the
            # publishing finds out.
            is_near = mode == "sync" or isinstance(self._root, LocalStore)
            if answer["failed"] is None and not answer["busy"]:
                answer["generation"] = self._branch.settle(step)
                store = self._root.child(step_folder(step))
                if is_near and replaces is None and not self._branch.is_left(store):
                    refuse_committed(store, step)
            return answer

        def begin_early(is_over: Callable[[], bool]) -> None:
            if (expected := planner.expected_contents()) is not None:
                self._stager.begin_early(place, expected.layout, expected.resolve, is_over)

        # Lazy copies late what it can, and stops no one for it.
        meanwhile = begin_early if mode != "lazy" else None
        decision = group.decide("collecting the state", look, combine, meanwhile)
        if decision["failed"] is not None:
            # One rank knows of it; the others will in a moment.
            failed = self._handles.get(decision["failed"])
            if failed is not None:
                failed.wait()
            raise IncompleteWriteError(
                "a save failed on another rank; nothing was committed", step=step
            )
        if decision["busy"]:
            if self._options.on_busy == "skip":
                return None
            ranks = ", ".join(map(str, decision["busy"]))
            raise IncompleteWriteError(
                f"saving step {step}: every image of rank {ranks} is still being written; save less often, "
                "or with more max_in_flight",
                step=step,
                rank=decision["busy"][0],
            )
        agreement = self._agreeing.agree(step, is_equal=decision["equal"])
        planner.accept(agreement, group.rank, group.world_size)
        return Attempt(
            id=decision["attempt"],
            step=step,
            world_size=group.world_size,
            generation=decision["generation"],
        )
