"""One save, from live state to a committed checkpoint.

    collect -> agree -> open attempt -> image -> shard file -> (all receipts) -> publish

Invariant: nothing of the live state changes, and a failure on any rank fails the save on all of them with
nothing committed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdp_ckpt.commit.catalog import CheckpointInfo, step_folder
from fsdp_ckpt.commit.publish import retire_manifest
from fsdp_ckpt.dcp.agreement import Agreement, agree
from fsdp_ckpt.dcp.save_planner import ShardSavePlanner
from fsdp_ckpt.dcp.summary import Summary
from fsdp_ckpt.dcp.writer import Attempt, ShardedStorageWriter, ShardReceipt
from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.ranks import RankGroup
from fsdp_ckpt.replicas import CheckReplicas, check_replicas
from fsdp_ckpt.snapshot.image import ImagePool
from fsdp_ckpt.storage.store import Store

if TYPE_CHECKING:
    from fsdp_ckpt.state.train_state import TrainState

__all__ = ["Saver"]

# Parts of the training state that every rank has of its own: what one rank lacks is not another's to give.
PARTS = ("data", "extra", "lr_scheduler", "progress")


class Saver:
    """Saves under one root, again and again: plan and buffers are kept between saves.

    Args:
        root: The run's root.
        group: The ranks.
        options: For the writer's filesystem.
        num_threads: Threads that digest and write, per rank.
        check: What to do about replicas that are not equal; ``None`` warns, where looking costs little.
    """

    def __init__(
        self,
        root: Store,
        group: RankGroup,
        options: Mapping[str, Any],
        *,
        num_threads: int,
        check: CheckReplicas | None,
    ) -> None:
        self._root = root
        self._group = group
        self._options = dict(options)
        self._num_threads = num_threads
        self._check = check
        self._pool = ImagePool()
        self._planner = ShardSavePlanner()
        self._agreed: tuple[str, Agreement] | None = None  # of the structure that ranks share

    def close(self) -> None:
        """Release the buffers."""
        self._pool.close()

    def save(self, state: TrainState, *, replace_damaged: bool) -> CheckpointInfo:
        """Save the state as the checkpoint of its step; called by every rank.

        Args:
            state: What is saved.
            replace_damaged: The step's checkpoint was found damaged, and may be replaced.

        Raises:
            CheckpointError: See :meth:`fsdp_ckpt.CheckpointManager.save`.
        """
        group, planner = self._group, self._planner
        step = state.progress.step
        try:
            group.run(
                "collecting the state",
                lambda: planner.set_up(
                    state.collect(), rank=group.rank, world_size=group.world_size
                ),
            )
            planner.accept(self._agree(step), group.rank, group.world_size)
            check_replicas(planner, group, self._check, state.parameter_names)
            return self._write(step, replace_damaged=replace_damaged)
        finally:
            planner.forget()

    def _agree(self, step: int) -> Agreement:
        """Exchange one hash; the summaries themselves only where ranks differ."""
        group, planner = self._group, self._planner
        if group.all_equal([step, planner.structure, planner.content()]):
            if self._agreed is None or self._agreed[0] != planner.structure:
                agreement = agree([planner.summary()] * group.world_size)
                self._agreed = planner.structure, agreement
            return self._agreed[1]
        self._agreed = None
        summary = planner.summary()
        prints: list[str] = []
        for rank, (its_step, fingerprint) in enumerate(group.gather([step, summary.fingerprint()])):
            if its_step != step:
                raise MismatchError(
                    f"rank {group.rank} saves step {step}, rank {rank} step {its_step}; advance the progress "
                    "of all ranks alike",
                    step=step,
                    rank=rank,
                )
            prints.append(fingerprint)
        # One rank of those that say the same says it for all of them.
        speaks = prints.index(prints[group.rank]) == group.rank
        spoken = group.gather(summary.to_json() if speaks else None)
        told = {
            fp: Summary.from_json(said) for fp, said in zip(prints, spoken, strict=True) if said
        }
        return agree([told[fingerprint] for fingerprint in prints], parts=PARTS)

    def _write(self, step: int, *, replace_damaged: bool) -> CheckpointInfo:
        group, planner = self._group, self._planner
        writer = ShardedStorageWriter(
            self._root.child(step_folder(step)),
            step=step,
            num_threads=self._num_threads,
            pool=self._pool,
            **self._options,
        )

        def open_attempt() -> dict[str, Any]:
            if replace_damaged:
                retire_manifest(writer.store)
            return dataclasses.asdict(writer.open_attempt(group.world_size))

        attempt = Attempt(**group.coordinate("opening an attempt", open_attempt))
        manifest = planner.draft_manifest()

        def write() -> Any:
            spare = manifest if group.is_coordinator else None
            return writer.write_contents(planner.contents(), attempt, group.rank, spare).to_json()

        def publish(receipts: list[Any]) -> Any:
            rows = [ShardReceipt.from_json(receipt) for receipt in receipts]
            published = writer.publish(manifest, attempt, rows)
            return dataclasses.asdict(CheckpointInfo.of(published, writer.store.url))

        return CheckpointInfo(**group.commit(f"saving step {step}", write, publish))
