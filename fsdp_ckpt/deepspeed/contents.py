"""What the files of a tag say, checked: that they belong together, and each field is what it must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fsdp_ckpt.deepspeed.folder import RankFiles
from fsdp_ckpt.deepspeed.torch_file import TorchFile, open_torch_file
from fsdp_ckpt.deepspeed.unpickler import Inert, StoredTensor
from fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError
from fsdp_ckpt.manifest.fields import count, counts, text
from fsdp_ckpt.manifest.strict_json import brief
from fsdp_ckpt.storage.store import Store

__all__ = ["Contents", "ModelFile", "OptimizerFile", "open_contents"]

Shapes = Mapping[str, tuple[int, ...]]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A ``model_states`` file.

    Args:
        key: Its name.
        content: All of it.
        step: Optimizer steps done.
        module: Name → tensor or value; in stage 3, parameters are empty here.
        shapes: Per group (stage 3: per flat vector) name → shape of what is trained.
        frozen: Name → shape of parameters that are not, or ``None`` where ``module`` has them.
        fragments: Name → this rank's range of a frozen parameter; in stage 2, the whole.
        buffers: Names of the buffers.
        tied: Further name → name.
    """

    key: str
    content: Mapping[str, Any]
    step: int
    module: Mapping[str, Any]
    shapes: Sequence[Shapes]
    frozen: Shapes | None
    fragments: Mapping[str, StoredTensor]
    buffers: frozenset[str]
    tied: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFile:
    """An ``optim_states`` file.

    Args:
        key: Its name.
        where: Its URL, for errors.
        rank: Whose.
        stage: 1, 2 or 3.
        num_partitions: Ranks that wrote one, as it says.
        flats: This rank's flat vectors of FP32 masters.
        states: Per flat vector the optimizer's state; none where the optimizer has none yet.
        param_groups: Hyperparameters and, as ``params``, positions of flat vectors; none where not saved.
        paddings: Per group the elements behind each parameter; none where there are none.
        slices: Per group name → (elements, start) of what the rank holds, as it says; none where not saved.
        loss_scaler: Its attributes; none where there is none.
    """

    key: str
    where: str
    rank: int
    stage: int
    num_partitions: int
    flats: Sequence[StoredTensor]
    states: Mapping[int, Mapping[str, Any]]
    param_groups: Sequence[Mapping[str, Any]]
    paddings: Sequence[Sequence[int]]
    slices: Sequence[Mapping[str, tuple[int, int]]]
    loss_scaler: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A whole checkpoint of DeepSpeed, opened.

    Args:
        store: Folder of the tag.
        model: By rank for stage 3, else one.
        optimizer: By rank.
    """

    store: Store
    model: Sequence[ModelFile]
    optimizer: Sequence[OptimizerFile]

    @property
    def keys(self) -> list[str]:
        """Names of all files: first the model's, then the optimizer's."""
        return [*(file.key for file in self.model), *(file.key for file in self.optimizer)]

    def position(self, rank: int) -> int:
        """Return the position in ``keys`` of a rank's optimizer file."""
        return len(self.model) + rank


def open_contents(store: Store, files: RankFiles, num_threads: int | None = None) -> Contents:
    """Open all files; reads no tensor.

    Args:
        store: Folder of the tag.
        files: In it.
        num_threads: Files in flight; by default as many as suit the store.

    Raises:
        CorruptCheckpointError: A file is damaged, or they do not belong together.
        UnencodableStateError: A file holds objects that could run code.
        StorageError: The store failed.
    """
    with ThreadPoolExecutor(num_threads or store.concurrency, "fsdp_ckpt-deepspeed") as threads:
        opened = list(
            threads.map(
                lambda key: open_torch_file(store, key, files.sizes[key]),
                (*files.model, *files.optimizer),
            )
        )
    num_models = len(files.model)
    model = [_checked(store, file, _model) for file in opened[:num_models]]
    optimizer = [
        _checked(store, file, partial(_optimizer, store, rank))
        for rank, file in enumerate(opened[num_models:])
    ]
    _refuse_strangers(store, model, optimizer)
    return Contents(store=store, model=model, optimizer=optimizer)


def _checked(store: Store, file: TorchFile, parse: Callable[[TorchFile], _T]) -> _T:
    where = f"{store.url}/{file.key}"
    try:
        return parse(file)
    except CheckpointError as e:
        raise CorruptCheckpointError(
            f"{where}: not a file of a ZeRO checkpoint ({brief(e)})", key=file.key
        ) from e
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        raise CorruptCheckpointError(
            f"{where}: not a file of a ZeRO checkpoint ({type(e).__name__}: {brief(e)})",
            key=file.key,
        ) from e


def _model(file: TorchFile) -> ModelFile:
    content = file.content
    frozen = content.get("frozen_param_shapes")
    fragments = content.get("frozen_param_fragments") or {}
    return ModelFile(
        key=file.key,
        content=content,
        step=count(content["global_steps"]),
        module=_mapping(content["module"]),
        shapes=[_shapes(group) for group in content["param_shapes"]],
        frozen=None if frozen is None else _shapes(frozen),
        fragments={text(name): _tensor(found) for name, found in fragments.items()},
        buffers=frozenset(map(text, content["buffer_names"])),
        tied={text(k): text(v) for k, v in (content.get("shared_params") or {}).items()},
    )


def _optimizer(store: Store, rank: int, file: TorchFile) -> OptimizerFile:
    content = _mapping(file.content["optimizer_state_dict"])
    # The optimizer of bf16 with FP32 gradients does what stage 1 does, and says nothing.
    stage = count(content.get("zero_stage", 1))
    if stage not in (1, 2, 3):
        raise CorruptCheckpointError(f"stage {stage}")
    declared = content["partition_count"]
    inner = content["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    flats = content["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]
    has_groups = isinstance(inner, dict)
    states = inner["state"] if has_groups else dict(enumerate(inner))
    scaler = content.get("loss_scaler")
    return OptimizerFile(
        key=file.key,
        where=f"{store.url}/{file.key}",
        rank=rank,
        stage=stage,
        num_partitions=max(counts(declared)) if isinstance(declared, list) else count(declared),
        flats=[_tensor(flat) for flat in flats],
        states={count(i): _mapping(state) for i, state in states.items()},
        param_groups=[_mapping(group) for group in inner["param_groups"]] if has_groups else (),
        paddings=[counts(group) for group in content.get("param_alignment_paddings") or ()],
        slices=[_slices(group) for group in content.get("param_slice_mappings") or ()],
        loss_scaler=scaler.attributes if isinstance(scaler, Inert) else {},
    )


def _slices(group: Mapping[Any, Any]) -> dict[str, tuple[int, int]]:
    found = {text(name): address.attributes for name, address in group.items()}
    return {name: (count(a["numel"]), count(a["start"])) for name, a in found.items()}


def _shapes(group: Mapping[Any, Any]) -> Shapes:
    return {text(name): counts(shape) for name, shape in group.items()}


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"a {type(value).__name__} where a dict is due")
    return value


def _tensor(value: Any) -> StoredTensor:
    if not isinstance(value, StoredTensor) or not value.is_row_major:
        raise CorruptCheckpointError(f"a {type(value).__name__} where a row-major tensor is due")
    return value


def _refuse_strangers(
    store: Store, model: Sequence[ModelFile], optimizer: Sequence[OptimizerFile]
) -> None:
    """Refuse files that do not belong together."""
    first = optimizer[0]
    if first.num_partitions != len(optimizer):
        raise CorruptCheckpointError(
            f"{store.url}: {len(optimizer)} optim_states files, {first.num_partitions} partitions declared "
            f"in {first.key}; a rank's file is missing, or files of two runs are here",
            key=first.key,
        )
    num_models = len(optimizer) if first.stage == 3 else 1
    if len(model) != num_models:
        raise CorruptCheckpointError(
            f"{store.url}: {len(model)} model_states files, {num_models} expected for stage {first.stage} "
            f"and {len(optimizer)} partitions; copy the tag's folder anew",
        )
    for ours in model:
        if ours.step != model[0].step:
            raise _stranger(store, ours.key, "step", ours.step, model[0].step)
        if (ours.shapes, ours.frozen) != (model[0].shapes, model[0].frozen):
            raise _stranger(store, ours.key, "parameters", "others", model[0].key + "'s")
    for file in optimizer:
        for what, found, expected in (
            ("stage", file.stage, first.stage),
            ("number of partitions", file.num_partitions, first.num_partitions),
            ("number of flat vectors", len(file.flats), len(first.flats)),
            ("dtypes", [f.dtype for f in file.flats], [f.dtype for f in first.flats]),
        ):
            if found != expected:
                raise _stranger(store, file.key, what, found, expected)
    # Stages 1 and 2 have one vector per group; the ranges of stage 3 are checked by their sum.
    if first.stage != 3 and len(first.flats) != len(model[0].shapes):
        raise _stranger(
            store, first.key, "number of groups", len(first.flats), len(model[0].shapes)
        )


def _stranger(store: Store, key: str, what: str, found: Any, expected: Any) -> Exception:
    return CorruptCheckpointError(
        f"{store.url}/{key}: {what} {found}, {expected} expected; the files are of two checkpoints, copy the "
        "tag's folder anew",
        key=key,
    )
