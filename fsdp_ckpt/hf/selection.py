"""Which tensors of a checkpoint come out, under which names and as which dtypes.

    manifest --what--> tensors --include, exclude--> kept --key_map or rename, prefix--> names in the output

A tied weight is a tensor under its first name and a value for every further one, so a model's tensors are
what ``save_pretrained`` would write: each once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, get_args

from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.errors import MismatchError, NotFoundError
from fsdp_ckpt.hf.cast import FLOATING, TARGETS
from fsdp_ckpt.hf.layout import OutputTensor
from fsdp_ckpt.manifest.schema import Manifest, TensorRow
from fsdp_ckpt.manifest.tree import Path, path_name

__all__ = [
    "ROOTS",
    "Selected",
    "Selection",
    "What",
    "belongs_to",
    "named_rows",
    "select_tensors",
    "short_name",
]

What: TypeAlias = Literal["model", "optimizer", "all", "ema"]
# Where each of them stands in the state, and with what its files' names begin.
ROOTS: dict[What, Path] = {
    "model": ("model",),
    "optimizer": ("optimizer",),
    "all": (),
    "ema": ("extra", "ema"),
}
_STEMS: dict[What, str] = {
    "model": "model",
    "optimizer": "optimizer",
    "all": "checkpoint",
    "ema": "model",
}
SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What is asked for.

    Args:
        what: ``model``; ``optimizer``, its state by parameter; ``ema``, the averaged model that is saved as
            ``extra["ema"]``; or ``all`` tensors, under their full names.
        include: Patterns of names (``*`` and ``?``) to keep; all, where there are none.
        exclude: Patterns of names to leave out.
        prefix: Put before every name in the output.
        rename: Pairs of a regular expression and what each of its matches becomes, applied in order.
        key_map: Name → name in the output, for single tensors; ``rename`` does not apply to them.
        dtype: What floating-point tensors become: ``BF16``, ``F16``, ``F32`` or ``F64``.
    """

    what: What = "model"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    prefix: str = ""
    rename: tuple[tuple[str, str], ...] = ()
    key_map: Mapping[str, str] = field(default_factory=dict)
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.what not in get_args(What):
            raise ValueError(f"what must be one of {', '.join(get_args(What))}, not {self.what!r}")
        if self.dtype is not None and self.dtype not in TARGETS:
            raise ValueError(f"dtype must be one of {', '.join(TARGETS)}, not {self.dtype!r}")
        for old, new in self.rename:
            try:
                re.sub(old, new, "")
            except (re.error, IndexError) as e:
                raise ValueError(f"rename {old!r} to {new!r}: {e}") from e

    @property
    def stem(self) -> str:
        """With what the output files' names begin."""
        return _STEMS[self.what]

    def keeps(self, name: str) -> bool:
        """Whether a tensor of this name comes out."""
        included = not self.include or any(fnmatchcase(name, p) for p in self.include)
        return included and not any(fnmatchcase(name, p) for p in self.exclude)

    def new_name(self, name: str) -> str:
        """Return a tensor's name in the output."""
        if name in self.key_map:
            return self.prefix + self.key_map[name]
        for old, new in self.rename:
            name = re.sub(old, new, name)
        return self.prefix + name

    def new_dtype(self, dtype: str) -> str:
        """Return a tensor's dtype in the output."""
        return self.dtype if self.dtype is not None and dtype in FLOATING else dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """What comes out.

    Args:
        tensors: In the checkpoint's order.
        rows: The checkpoint's rows, by name in the output.
        left_out: Names of what belongs to it and is no tensor, or is each rank's own.
    """

    tensors: tuple[OutputTensor, ...]
    rows: Mapping[str, TensorRow]
    left_out: tuple[str, ...]


def select_tensors(checkpoint: Checkpoint, selection: Selection) -> Selected:
    """Choose and name tensors.

    Raises:
        NotFoundError: The checkpoint holds none of what is asked for.
        MismatchError: Two tensors get one name, a key of ``key_map`` does not exist, or a part of the model
            is each rank's own, so that there is no one model.
    """
    manifest = checkpoint.manifest
    named = list(named_rows(manifest, selection))
    own = list(_names_under(manifest.own_paths, selection))
    if own and selection.what in ("model", "ema"):
        raise MismatchError(
            f"{checkpoint.store.url}: {own[0]} is each rank's own ({len(own)} such entries of the model); "
            "one model cannot hold them",
            step=manifest.step,
            key=own[0],
        )
    if not named:
        raise _nothing_there(checkpoint, selection)
    _check_key_map(selection, {name for name, _ in named})
    rows: dict[str, TensorRow] = {}
    for name, row in named:
        new = selection.new_name(name)
        if not new or rows.setdefault(new, row) is not row:
            other = f"the name of {rows[new].name} too" if new else "no name"
            raise MismatchError(
                f"{row.name} would be called {new!r}, {other}; change rename, key_map or prefix",
                step=manifest.step,
                key=row.name,
            )
    tensors = tuple(
        OutputTensor(name=name, dtype=selection.new_dtype(row.dtype), shape=row.shape)
        for name, row in rows.items()
    )
    left_out = (*own, *_names_under(manifest.values, selection))
    return Selected(tensors=tensors, rows=rows, left_out=left_out)


def named_rows(manifest: Manifest, selection: Selection) -> Iterator[tuple[str, TensorRow]]:
    """Yield the names, before any renaming, and rows of the tensors that are asked for."""
    root = ROOTS[selection.what]
    rows = [row for row in manifest.tensors if _is_under(row.path, root)]
    names = {row.name: short_name(row.path, selection.what) for row in rows}
    if selection.what == "ema" and any(n.startswith("module.") for n in names.values()):
        # torch's AveragedModel holds the model as its ``module``, beside a count of averages.
        rows = [row for row in rows if names[row.name].startswith("module.")]
        names = {row.name: names[row.name].removeprefix("module.") for row in rows}
    for row in rows:
        if selection.keeps(names[row.name]):
            yield names[row.name], row


def short_name(path: Path, what: What) -> str:
    """Return a tensor's name without what all of them have in common."""
    # ("optimizer", "state", parameter, key)
    common = 2 if what == "optimizer" and path[1] == "state" else len(ROOTS[what])
    return path_name(path[common:])


def _names_under(paths: Iterable[Path], selection: Selection) -> Iterator[str]:
    root = ROOTS[selection.what]
    return (path_name(path[len(root) :]) for path in paths if _is_under(path, root))


def belongs_to(path: Path, what: What) -> bool:
    """Whether what stands at ``path`` is a part of ``what``."""
    return _is_under(path, ROOTS[what])


def _is_under(path: Path, root: Path) -> bool:
    return len(path) > len(root) and path[: len(root)] == root


def _check_key_map(selection: Selection, names: set[str]) -> None:
    absent = [name for name in selection.key_map if name not in names]
    if absent:
        shown = ", ".join(absent[:SHOWN]) + (", ..." if len(absent) > SHOWN else "")
        raise MismatchError(
            f"key_map: {len(absent)} names that no tensor has: {shown}; correct or remove them",
            key=absent[0],
        )


def _nothing_there(checkpoint: Checkpoint, selection: Selection) -> NotFoundError:
    manifest = checkpoint.manifest
    root = path_name(ROOTS[selection.what])
    there = list(dict.fromkeys(path_name(row.path[:2]) for row in manifest.tensors))
    shown = ", ".join(there[:SHOWN]) + (", ..." if len(there) > SHOWN else "")
    kind = "no model weights" if selection.what == "model" else f"no tensors of {selection.what}"
    where = f"no tensor under {root!r} " if root else "no tensor "
    if selection.include or selection.exclude:
        where += "that include and exclude leave "
    return NotFoundError(
        f"{checkpoint.store.url}: {kind}: {where}among {len(manifest.tensors)} tensors ({shown})",
        step=manifest.step,
    )
