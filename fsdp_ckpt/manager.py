"""CheckpointManager: the one object a training job talks to.

Invariant: all ranks call the same methods in the same order, and leave each with the same outcome. A
restore changes nothing live before every rank holds its verified bytes; a save changes nothing at all.

    save     collect -> agree -> open attempt -> image -> shard file -> (all receipts) -> publish
    restore  find -> compare -> fetch -> (all ranks have theirs) -> deliver -> apply
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fsdp_ckpt.commit.catalog import (
    CheckpointInfo,
    SkippedCheckpoint,
    find_checkpoints,
    step_folder,
)
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.publish import retire_manifest
from fsdp_ckpt.dcp.agreement import Agreement, Summary, agree
from fsdp_ckpt.dcp.load_planner import ReshardLoadPlanner, matches
from fsdp_ckpt.dcp.reader import ShardedStorageReader
from fsdp_ckpt.dcp.save_planner import ShardSavePlanner
from fsdp_ckpt.dcp.saved_state import saved_state
from fsdp_ckpt.dcp.writer import Attempt, ShardedStorageWriter, ShardReceipt
from fsdp_ckpt.errors import (
    ClosedError,
    CorruptCheckpointError,
    MismatchError,
    NotFoundError,
    UnsupportedFormatError,
)
from fsdp_ckpt.manifest.tree import path_name
from fsdp_ckpt.ranks import RankGroup
from fsdp_ckpt.snapshot.image import ImagePool
from fsdp_ckpt.storage.open import open_store

if TYPE_CHECKING:
    from fsdp_ckpt.state.train_state import TrainState

__all__ = ["CheckpointManager", "RestoreReport", "SaveHandle"]

logger = logging.getLogger("fsdp_ckpt")

# Parts of the training state that every rank has of its own: what one rank lacks is not another's to give.
PARTS = ("data", "extra", "lr_scheduler", "progress")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What a restore did, the same on all ranks but for what is a rank's own.

    Args:
        step: Restored step, or ``None`` where the run starts fresh.
        attempt: Id of the save it came from.
        saved_world_size: Ranks that saved.
        preserved: Parts of the state that are back to the bit.
        derived: Names taken from another rank's content, or made up deterministically, as for the random
            states of ranks that did not exist.
        dropped: Names left out.
        missing: Live names that the checkpoint lacks; they keep their live values.
        unexpected: Saved names that the live state lacks.
        cast: Name → (saved dtype, live dtype).
        skipped: Newer checkpoints that were passed over, with the reason.
    """

    step: int | None
    attempt: str | None = None
    saved_world_size: int | None = None
    preserved: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    skipped: tuple[SkippedCheckpoint, ...] = ()

    @property
    def is_fresh(self) -> bool:
        """Whether there was nothing to restore."""
        return self.step is None


class SaveHandle:
    """A save's outcome. This version saves synchronously, so it is done when you hold it."""

    def __init__(self, info: CheckpointInfo) -> None:
        self._info = info

    def wait_staged(self) -> None:
        """Return when the live state may change again."""

    def wait(self) -> CheckpointInfo:
        """Return the committed checkpoint."""
        return self._info

    def done(self) -> bool:
        """Whether the save has ended."""
        return True


class CheckpointManager:
    """Saves and restores a training run under one root; every rank of the job has its own instance.

    Args:
        root: A path, or any URL that fsspec knows; made by the first save.
        state: What is saved and restored.
        timeout_s: How long a rank waits for the others in one exchange, in seconds; must cover the slowest
            rank's writing.
        num_threads: Threads that read or write, per rank.
        storage_options: Passed to the fsspec filesystem.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        state: TrainState,
        *,
        timeout_s: float = 1800.0,
        num_threads: int = 2,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.state = state
        self._options = dict(storage_options or {})
        self._root = open_store(root, **self._options)
        self._group = RankGroup.of(timeout_s)
        self._num_threads = num_threads
        self._pool = ImagePool()
        self._planner = ShardSavePlanner()
        self._agreed: tuple[str, Agreement] | None = None  # of the structure that ranks share
        self._damaged: dict[int, str] = {}  # steps that the last restore passed over as damaged
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the buffers; closing twice is fine."""
        self._pool.close()
        self._planner = ShardSavePlanner()  # it refers to the live tensors
        self._closed = True

    # --- what is there ---

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return every whole checkpoint, newest first; any rank may call it alone.

        Raises:
            StorageError: The root cannot be read.
        """
        self._check_open()
        return [found for found in find_checkpoints(self._root) if isinstance(found, CheckpointInfo)]

    def latest(self) -> CheckpointInfo | None:
        """Return the newest whole checkpoint, or ``None``; any rank may call it alone."""
        self._check_open()
        return next((f for f in find_checkpoints(self._root) if isinstance(f, CheckpointInfo)), None)

    # --- save ---

    def save(self) -> SaveHandle:
        """Save the state as the checkpoint of ``state.progress.step``; called by every rank.

        Returns:
            A handle; the checkpoint is committed and durable.

        Raises:
            UnencodableStateError: A value cannot be saved; nothing was written.
            AlreadyCommittedError: The step has a checkpoint already.
            IncompleteWriteError: A rank failed to write; nothing was committed.
            RankFailureError: A rank did not answer in time.
        """
        self._check_open()
        group, planner = self._group, self._planner
        step = self.state.progress.step
        group.run(
            "collecting the state",
            lambda: planner.set_up(
                self.state.collect(), rank=group.rank, world_size=group.world_size
            ),
        )
        planner.accept(self._agree(step), group.rank, group.world_size)
        writer = ShardedStorageWriter(
            self._root.child(step_folder(step)).url,
            step=step,
            num_threads=self._num_threads,
            pool=self._pool,
            **self._options,
        )
        attempt = Attempt(
            **group.coordinate(
                "opening an attempt",
                lambda: dataclasses.asdict(self._open_attempt(writer)),
            )
        )
        manifest = planner.draft_manifest()

        def write() -> Any:
            spare = manifest if group.is_coordinator else None
            return writer.write_contents(planner.contents(), attempt, group.rank, spare).to_json()

        def publish(receipts: list[Any]) -> Any:
            rows = [ShardReceipt.from_json(receipt) for receipt in receipts]
            published = writer.publish(manifest, attempt, rows)
            return dataclasses.asdict(CheckpointInfo.of(published, writer.store.url))

        try:
            info = CheckpointInfo(**group.commit(f"saving step {step}", write, publish))
        finally:
            planner.forget()
        if group.is_coordinator:
            logger.info("saved step %d, %d bytes, to %s", step, info.num_bytes, info.url)
        return SaveHandle(info)

    def _agree(self, step: int) -> Agreement:
        """Exchange one hash; the summaries themselves only where ranks differ."""
        group, planner = self._group, self._planner
        if group.all_equal([step, planner.structure, planner.content()]):
            if self._agreed is None or self._agreed[0] != planner.structure:
                agreement = agree([planner.summary()] * group.world_size)
                self._agreed = planner.structure, agreement
            return self._agreed[1]
        self._agreed = None
        distinct: dict[str, Summary] = {}
        summaries = []
        for rank, (its_step, encoded) in enumerate(group.gather([step, planner.summary().to_json()])):
            if its_step != step:
                raise MismatchError(
                    f"rank {group.rank} saves step {step}, rank {rank} step {its_step}; advance the progress of "
                    "all ranks alike",
                    step=step,
                    rank=rank,
                )
            key = json.dumps(encoded)
            if key not in distinct:
                distinct[key] = Summary.from_json(encoded)
            summaries.append(distinct[key])
        return agree(summaries, parts=PARTS)

    def _open_attempt(self, writer: ShardedStorageWriter) -> Attempt:
        """Open an attempt; runs on the coordinator alone.

        A checkpoint that a restore of this run found damaged makes room for the one that replaces it.
        """
        if self._damaged.pop(writer.step, None) is not None:
            retire_manifest(writer.store)
        return writer.open_attempt(self._group.world_size)

    # --- restore ---

    def restore(
        self,
        step: int | None = None,
        *,
        allow_missing: Iterable[str] = (),
        allow_unexpected: Iterable[str] = (),
        allow_cast: bool = False,
        allow_torn: bool = False,
    ) -> RestoreReport:
        """Bring the live state back; called by every rank, with the same arguments.

        Without ``step``, the newest whole checkpoint; a damaged one is passed over, by all ranks alike, and
        reported. A root without any checkpoint starts fresh: the live state stays as it is.

        Args:
            step: The checkpoint to restore; damage is then an error.
            allow_missing: Patterns (``fnmatch``) of live names that the checkpoint may lack.
            allow_unexpected: Patterns of saved names that the live state may lack.
            allow_cast: Load tensors into another dtype.
            allow_torn: Start fresh although saves were begun under this root and none was committed.

        Raises:
            NotFoundError: No such step, or only torn attempts.
            MismatchError: Keys, shapes or dtypes differ; all of them in one error, nothing has changed.
            CorruptCheckpointError: Damaged, and named by ``step`` or the last one there is.
            StorageError: The root or a file cannot be read now.
            RankFailureError: A rank did not answer in time.
        """
        self._check_open()
        planner_options = {
            "allow_missing": tuple(allow_missing),
            "allow_unexpected": tuple(allow_unexpected),
            "allow_cast": allow_cast,
        }
        damaged: dict[int, str] = {}
        self._damaged.clear()
        while True:
            found = self._group.coordinate(
                "looking for a checkpoint", lambda: self._find(step, damaged, allow_torn)
            )
            skipped = tuple(SkippedCheckpoint(**s) for s in found["skipped"])
            if found["step"] is None:
                self._note(skipped, f"no checkpoint under {self._root.url}: starting fresh")
                return RestoreReport(step=None, skipped=skipped)
            try:
                report = self._restore_from(found["step"], found["attempt"], planner_options)
            except CorruptCheckpointError as e:
                if step is not None:
                    raise
                damaged[found["step"]] = str(e)
                continue
            self._note(skipped, f"restored step {report.step} from {self._root.url}")
            return dataclasses.replace(report, skipped=skipped)

    def _note(self, skipped: Iterable[SkippedCheckpoint], outcome: str) -> None:
        """Remember what is damaged, and say once what happened."""
        self._damaged = {s.step: s.reason for s in skipped if not s.torn}
        if self._group.is_coordinator:
            for s in skipped:
                logger.warning("passed over the checkpoint of step %d: %s", s.step, s.reason)
            logger.warning(outcome)

    def _find(self, step: int | None, damaged: Mapping[int, str], allow_torn: bool) -> dict[str, Any]:
        """Choose the checkpoint; runs on the coordinator alone."""
        if step is not None:
            return {**self._find_step(step), "skipped": []}
        skipped: list[SkippedCheckpoint] = []
        for found in find_checkpoints(self._root):
            if isinstance(found, SkippedCheckpoint):
                if found.newer:
                    # Not damage: going on from an older one would throw away a good checkpoint.
                    raise UnsupportedFormatError(found.reason, step=found.step)
                skipped.append(found)
            elif found.step in damaged:
                reason = damaged[found.step]
                skipped.append(SkippedCheckpoint(step=found.step, reason=reason, torn=False))
            else:
                passed = [dataclasses.asdict(s) for s in skipped]
                return {"step": found.step, "attempt": found.attempt, "skipped": passed}
        broken = [s for s in skipped if not s.torn]
        if broken:
            raise CorruptCheckpointError(
                f"{self._root.url}: no whole checkpoint among {len(skipped)}; the newest: {broken[0].reason}",
                step=broken[0].step,
            )
        if skipped and not allow_torn:
            raise NotFoundError(
                f"{self._root.url}: no checkpoint, only {len(skipped)} torn attempt(s), the newest of step "
                f"{skipped[0].step}; to start the run anew, pass allow_torn=True or another root"
            )
        return {"step": None, "skipped": [dataclasses.asdict(s) for s in skipped]}

    def _find_step(self, step: int) -> dict[str, Any]:
        try:
            checkpoint = Checkpoint.open(self._root.child(step_folder(step)))
        except NotFoundError as e:
            there = [found.step for found in self.checkpoints()]
            shown = ", ".join(map(str, there[:5])) or "none"
            raise NotFoundError(
                f"{self._root.url}: no checkpoint of step {step}; newest steps there: {shown}", step=step
            ) from e
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"step {step}: {e}", step=step, key=e.key) from e
        if checkpoint.manifest.step != step:
            raise CorruptCheckpointError(
                f"{checkpoint.store.url}: the manifest is of step {checkpoint.manifest.step}", step=step
            )
        checkpoint.check_files()
        return {"step": step, "attempt": checkpoint.manifest.attempt}

    def _restore_from(self, step: int, attempt: str, options: Mapping[str, Any]) -> RestoreReport:
        group, state = self._group, self.state
        reader = ShardedStorageReader(
            self._root.child(step_folder(step)).url, num_threads=self._num_threads, **self._options
        )
        planner = ReshardLoadPlanner(**options)
        # A rank's own random states stay its own on another world size too.
        reader.set_up(
            rank=group.rank,
            world_size=group.world_size,
            keep_own=lambda name: name.startswith("rng."),
        )
        leaves: dict[Any, Any] = {}

        def compare() -> Any:
            manifest = reader.checkpoint.manifest
            if manifest.attempt != attempt:
                raise CorruptCheckpointError(
                    f"step {step}: attempt {attempt} was found, {manifest.attempt} is there now", step=step
                )
            saved = saved_state(manifest)
            plan = state.plan_restore(
                saved,
                rank=group.rank,
                world_size=group.world_size,
                allowed=lambda name: matches(name, options["allow_missing"]),
            )
            leaves.update(plan.leaves)
            planner.set_up(
                leaves,
                manifest,
                rank=group.rank,
                put=leaves.__setitem__,
                missing=plan.missing,
                problems=plan.problems,
                left_out=plan.left_out,
            )
            return saved, plan

        saved, plan = group.run("comparing the checkpoint", compare)
        unclaimed = group.common(planner.unclaimed)
        group.run("comparing the checkpoint", lambda: planner.judge(unclaimed))

        def fetch() -> Any:
            fetched = reader.fetch(planner.create_local_plan())
            absent = frozenset(fetched.absent)
            for path in [p for p in leaves if not planner.is_loaded(p) or path_name(p) in absent]:
                del leaves[path]
            reader.deliver_values(fetched, planner)  # into the leaves: nothing live
            state.check(plan, leaves)
            return fetched

        fetched = group.run("reading the checkpoint", fetch)

        def apply() -> None:
            reader.deliver_tensors(fetched, planner)
            state.apply(plan, leaves, saved.seed, group.rank)

        group.run("restoring the state", apply)
        differences = planner.differences
        touched = {".".join(path[:2]) if path[0] == "extra" else path[0] for path in leaves}
        derived = tuple(plan.derived)
        return RestoreReport(
            step=step,
            attempt=attempt,
            saved_world_size=saved.world_size,
            preserved=tuple(sorted(touched - {"tied", *derived})),
            derived=derived,
            dropped=tuple(plan.dropped),
            missing=tuple(differences.missing),
            unexpected=tuple(differences.unexpected),
            cast=dict(differences.cast),
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the manager is closed; make a new one")
