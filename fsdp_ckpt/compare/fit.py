"""Whether a checkpoint fits a model that is known by other files: a checkpoint of it, or Hugging Face's.

Names, shapes and dtypes are compared as a restore does it, and nothing is read but manifests and headers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.compare.sides import Content, Side, Tensor, open_source, side_of
from fsdp_ckpt.hf.selection import Selection, What
from fsdp_ckpt.storage.store import Store

__all__ = ["Fit", "fit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a checkpoint fits.

    Args:
        against: What it was compared with.
        what: Which part: ``model`` against files of a model.
        num_names: Names on both sides.
        missing: Names that the checkpoint lacks.
        unexpected: Names that only the checkpoint has.
        shapes: A line per tensor of another shape.
        dtypes: A line per tensor of another dtype: ``allow_cast`` converts it.
        kinds: A line per name that is a tensor on one side and a value on the other.
    """

    against: str
    what: What
    num_names: int = 0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether a restore would need no permission."""
        return not (self.missing or self.unexpected or self.shapes or self.dtypes or self.kinds)


def fit(checkpoint: Checkpoint, store: Store) -> Fit:
    """Compare a checkpoint with what a job's state is like.

    Args:
        checkpoint: Open.
        store: A run's root, a checkpoint's folder, or a folder of safetensors files.

    Raises:
        NotFoundError: Nothing to compare with.
        CorruptCheckpointError: It is damaged.
        StorageError: It cannot be read now.
    """
    source = open_source(store)
    what: What = "all" if isinstance(source, Checkpoint) else "model"
    here = side_of(checkpoint, Selection(what=what))
    live = side_of(source, Selection(what=what))
    missing = [name for name in _names(live, live.is_model) if here.get(name) is None]
    # A tied tensor may stand under another of its names there.
    known = {here.aliases.get(name, name) for name in live.contents}
    unexpected = [
        name for name in _names(here, live.is_model) if live.get(name) is None and name not in known
    ]
    shapes, dtypes, kinds = [], [], []
    num_names = 0
    for name, there in live.contents.items():
        saved = here.get(name)
        if saved is None:
            continue
        num_names += 1
        if isinstance(saved, Tensor) != isinstance(there, Tensor):
            kinds.append(f"{name}: {_kind(saved)} in the checkpoint, {_kind(there)} there")
        elif isinstance(saved, Tensor) and isinstance(there, Tensor):
            if saved.shape != there.shape:
                shapes.append(
                    f"{name}: shape {list(saved.shape)} in the checkpoint, {list(there.shape)} there"
                )
            if saved.dtype != there.dtype:
                dtypes.append(f"{name}: dtype {saved.dtype} in the checkpoint, {there.dtype} there")
    return Fit(
        against=live.url,
        what=what,
        num_names=num_names,
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        shapes=tuple(shapes),
        dtypes=tuple(dtypes),
        kinds=tuple(kinds),
    )


def _names(side: Side, only_tensors: bool) -> Iterator[str]:
    for name, content in side.contents.items():
        if isinstance(content, Tensor) or not only_tensors:
            yield name


def _kind(content: Content) -> str:
    return "a tensor" if isinstance(content, Tensor) else "a value"
