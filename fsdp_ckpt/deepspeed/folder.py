"""The folder of a DeepSpeed checkpoint: which tag is meant, and which files belong to it.

DIR/latest                                                     names a tag
DIR/<tag>/mp_rank_00_model_states.pt                           stages 1 and 2
DIR/<tag>/zero_pp_rank_<rank>_mp_rank_00_model_states.pt       stage 3
DIR/<tag>/[bf16_]zero_pp_rank_<rank>_mp_rank_00_optim_states.pt
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_ckpt.errors import CorruptCheckpointError, MismatchError, NotFoundError
from fsdp_ckpt.storage.store import Store

__all__ = ["RankFiles", "find_files", "find_tag"]

LATEST = "latest"
MAX_TAG_BYTES = 1024
_NAME = re.compile(
    r"(?P<bf16>bf16_)?(?:zero_pp_rank_(?P<rank>\d{1,9})_)?mp_rank_(?P<model_rank>\d+)_"
    r"(?P<kind>model|optim)_states\.pt",
    re.ASCII,
)
# Of mixtures of experts, and of pipelines.
_FOREIGN = re.compile(r"(expp_rank|layer|expert)_.*\.pt", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    """Names of a tag's files.

    Args:
        model: By rank for stage 3, else one.
        optimizer: By rank.
        sizes: Bytes of each.
    """

    model: tuple[str, ...]
    optimizer: tuple[str, ...]
    sizes: Mapping[str, int]


def find_tag(store: Store, tag: str | None = None) -> Store:
    """Return the folder of a tag: the one asked for, the one that ``latest`` names, or ``store`` itself.

    Raises:
        NotFoundError: No checkpoint of DeepSpeed here, or no such tag.
        CorruptCheckpointError: ``latest`` names none.
        StorageError: The store failed.
    """
    files = store.list_files()
    if tag is None and any(map(_NAME.fullmatch, files)):
        return store
    named_by = "" if tag is not None else f" which {store.url}/{LATEST} names,"
    if tag is None:
        if LATEST not in files:
            raise NotFoundError(
                f"{store.url}: neither a file {LATEST} nor files of DeepSpeed's ranks here; name the folder "
                "that was given to save_checkpoint, or a tag in it",
                key=LATEST,
            )
        tag = store.read(LATEST, MAX_TAG_BYTES).decode(errors="replace").strip()
        if not tag or tag in (".", "..") or "/" in tag or "\\" in tag:
            raise CorruptCheckpointError(
                f"{store.url}/{LATEST}: {tag[:80]!r} is not a tag of this folder; name one with --tag",
                key=LATEST,
            )
    folder = store.child(tag)
    if not any(map(_NAME.fullmatch, folder.list_files())):
        present = ", ".join(name for name in store.list_folders()[:5]) or "none"
        raise NotFoundError(
            f"{store.url}/{tag}:{named_by} no files of DeepSpeed's ranks there; folders here: {present}",
            key=tag,
        )
    return folder


def find_files(store: Store) -> RankFiles:
    """Sort a tag's files by kind and rank.

    Raises:
        MismatchError: The run sliced its model in other ways than ZeRO's.
        CorruptCheckpointError: A rank's file is missing, or files of two runs are here.
        StorageError: The store failed.
    """
    sizes = store.list_files()
    foreign = [name for name in sizes if _FOREIGN.fullmatch(name)]
    found: dict[str, dict[int, str]] = {"model": {}, "optim": {}}
    for name in sizes:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        if int(match["model_rank"]) != 0:
            foreign.append(name)
            continue
        of_kind, rank = found[match["kind"]], int(match["rank"] or 0)
        if rank in of_kind:
            raise CorruptCheckpointError(
                f"{store.url}: {of_kind[rank]} and {name} are both rank {rank}'s; files of two runs are "
                "here, move those of the older one away",
                rank=rank,
                key=name,
            )
        of_kind[rank] = name
    if foreign:
        raise MismatchError(
            f"{store.url}/{foreign[0]}: of a model that is cut by tensor, pipeline or expert parallelism "
            "too, and only data parallel ZeRO checkpoints are imported",
            key=foreign[0],
        )
    model, optimizer = (_in_order(store, kind, by_rank) for kind, by_rank in found.items())
    return RankFiles(model=model, optimizer=optimizer, sizes=sizes)


def _in_order(store: Store, kind: str, by_rank: Mapping[int, str]) -> tuple[str, ...]:
    for rank in range(max(by_rank, default=0) + 1):
        if rank not in by_rank:
            raise CorruptCheckpointError(
                f"{store.url}: the {kind}_states file of rank {rank} is missing ({len(by_rank)} are here); "
                "copy it here, or take another tag",
                rank=rank,
            )
    return tuple(by_rank[rank] for rank in sorted(by_rank))
