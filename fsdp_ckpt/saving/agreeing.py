"""What the ranks of a save agree on, by comparing one digest, or their summaries where digests differ.

Invariant: all ranks leave with the same agreement or the same error; an agreement is used again for as long
as the structure stays the same.
"""

from __future__ import annotations

from fsdp_ckpt.dcp.agreement import Agreement, agree
from fsdp_ckpt.dcp.save_planner import ShardSavePlanner
from fsdp_ckpt.dcp.summary import Summary
from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.ranks.group import RankGroup

__all__ = ["Agreeing"]

# Parts of the training state that every rank has of its own: what one rank lacks is not another's to give.
PARTS = ("data", "extra", "lr_scheduler", "progress")


class Agreeing:
    """Agrees, save after save.

    Args:
        group: The ranks.
        planner: Knows what this rank has.
    """

    def __init__(self, group: RankGroup, planner: ShardSavePlanner) -> None:
        self._group = group
        self._planner = planner
        self._agreed: tuple[str, Agreement] | None = None  # of the structure that ranks share

    def agree(self, step: int, *, is_equal: bool) -> Agreement:
        """Return what ranks agree on; called by every rank.

        Args:
            step: What this rank saves.
            is_equal: Whether all ranks' digests are equal: then nothing is exchanged.

        Raises:
            MismatchError: Ranks save different steps, or contradict each other about the state.
        """
        group, planner = self._group, self._planner
        if is_equal:
            if self._agreed is None or self._agreed[0] != planner.structure:
                agreement = agree([planner.summary()] * group.world_size)
                self._agreed = planner.structure, agreement
            return self._agreed[1]
        self._agreed = None
        summary = group.run("describing the state", planner.summary)
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
