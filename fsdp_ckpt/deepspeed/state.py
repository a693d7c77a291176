"""A DeepSpeed checkpoint as the state that :class:`fsdp_ckpt.TrainState` would have saved.

    FP32 masters, frozen parameters, buffers   -> ["model", name]
    further names of tied parameters           -> ["tied", name]
    moments, step, hyperparameters             -> ["optimizer", ...]
    counters, loss scale                       -> ["progress", ...], ["engine", ...]
    LR schedule, client state                  -> ["lr_scheduler", ...], ["extra", "client_state", ...]

Names are the plain module's. 16-bit weights that have masters are left: they are the rounded masters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_ckpt.deepspeed.contents import Contents
from fsdp_ckpt.deepspeed.optimizer_state import OptimizerState
from fsdp_ckpt.deepspeed.parted import from_flats, from_fragments, whole
from fsdp_ckpt.deepspeed.partitions import Segment, cut_parameters
from fsdp_ckpt.deepspeed.tensors import PartedTensor
from fsdp_ckpt.deepspeed.unpickler import StoredTensor
from fsdp_ckpt.errors import CorruptCheckpointError, UnencodableStateError
from fsdp_ckpt.manifest.fields import count
from fsdp_ckpt.manifest.tree import Path, flatten, path_name
from fsdp_ckpt.manifest.typed_json import Codec, Json

__all__ = ["ImportedState", "read_state"]

# Of a model_states file; everything else in it the program gave as client_state.
_OWN_KEYS = frozenset(
    {
        "buffer_names", "checkpoint_parallel_dimensions", "data_sampler", "dp_world_size", "ds_config",
        "ds_version", "frozen_param_fragments", "frozen_param_shapes", "global_samples", "global_steps",
        "lr_scheduler", "module", "mp_world_size", "num_experts", "optimizer", "param_shapes", "random_ltd",
        "shared_params", "skipped_steps", "sparse_tensor_module_names", "universal_checkpoint_info",
    }
)  # fmt: skip
# What changes of a dynamic loss scale; the rest of it is configuration.
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_HALVES = ("F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedState:
    """All that is taken over.

    Args:
        step: Optimizer steps done.
        tensors: Path → tensor.
        values: Path → typed JSON.
        dropped: Names of what has no place in a checkpoint.
    """

    step: int
    tensors: Mapping[Path, PartedTensor]
    values: Mapping[Path, Json]
    dropped: tuple[str, ...]


def read_state(contents: Contents, *, widen: bool) -> ImportedState:
    """Take a checkpoint's content apart; reads only step counts.

    Args:
        contents: As opened.
        widen: Make FP32 of frozen parameters and buffers of 16 bits.

    Raises:
        CorruptCheckpointError: Something is missing, or files do not belong together.
        StorageError: The store failed.
    """
    reading = _Reading(contents, widen)
    shapes = {name: shape for group in contents.model[0].shapes for name, shape in group.items()}
    segments = cut_parameters(contents.optimizer, contents.model[0].shapes)
    _refuse_other_slices(contents, segments)
    reading.add_model(shapes, segments)
    reading.add_optimizer(OptimizerState(contents, shapes, segments))
    reading.add_values()
    return ImportedState(
        step=contents.model[0].step,
        tensors=reading.tensors,
        values=reading.values,
        dropped=tuple(reading.dropped),
    )


def _refuse_other_slices(contents: Contents, segments: Mapping[str, Sequence[Segment]]) -> None:
    """Compare with what each rank of stages 1 and 2 says it holds: a file in another rank's place."""
    expected: dict[int, dict[str, tuple[int, int]]] = {f.rank: {} for f in contents.optimizer}
    for name, found in segments.items():
        for segment in found:
            expected[segment.rank][name] = (segment.high - segment.low, segment.start)
    for file in contents.optimizer:
        mine = expected[file.rank]
        slices = {name: held for group in file.slices for name, held in group.items()}
        if file.slices and mine != slices:
            name = min(n for n in {*mine, *slices} if mine.get(n) != slices.get(n))
            raise CorruptCheckpointError(
                f"{file.where}: says it holds (elements, start) {slices.get(name)} of {name}, "
                f"{mine.get(name)} expected of rank {file.rank}; the file is another rank's or another "
                "checkpoint's, copy the tag's folder anew",
                rank=file.rank,
                key=file.key,
            )


class _Reading:
    """Collects what is taken over."""

    def __init__(self, contents: Contents, widen: bool) -> None:
        self._contents = contents
        self._model = contents.model[0]
        self._widen = widen
        self.tensors: dict[Path, PartedTensor] = {}
        self.values: dict[Path, Json] = {}
        self.dropped: list[str] = []

    def add_model(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        segments: Mapping[str, Sequence[Segment]],
    ) -> None:
        """Add masters, frozen parameters, buffers, what modules make up, and names of tied parameters."""
        contents, model = self._contents, self._model
        masters = {(f.rank, i): flat for f in contents.optimizer for i, flat in enumerate(f.flats)}
        for name, shape in shapes.items():
            self.tensors["model", name] = from_flats(contents, name, shape, segments[name], masters)
        for name, shape in (model.frozen or {}).items():
            self._add_unmastered(name, from_fragments(contents, name, shape))
        for name, value in model.module.items():
            if ("model", name) in self.tensors or name in model.tied:
                continue
            if not isinstance(value, StoredTensor):
                self._add(("model", name), value)
            elif len(contents.model) > 1 and name not in model.buffers:
                self.dropped.append(f"model.{name}")  # stage 3's empty place of a parameter
            else:
                self._add_unmastered(name, whole(contents, name, value))
        for name, first in model.tied.items():
            if ("model", first) in self.tensors:
                self.values["tied", name] = first

    def _add_unmastered(self, name: str, tensor: PartedTensor) -> None:
        if self._widen and tensor.dtype in _HALVES:
            tensor = dataclasses.replace(tensor, dtype="F32")
        self.tensors["model", name] = tensor

    def add_optimizer(self, optimizer: OptimizerState) -> None:
        """Add state and groups."""
        for name, key, tensor in optimizer.tensors():
            self.tensors["optimizer", "state", name, key] = tensor
        for name, key, value in optimizer.values():
            self._add(("optimizer", "state", name, key), value)
        for group in optimizer.groups():
            for key, value in group.items():
                self._add(("optimizer", "param_groups", group["params"][0], key), value)

    def add_values(self) -> None:
        """Add counters, LR schedule, loss scale and client state."""
        content, step = self._model.content, self._model.step
        samples = count(content.get("global_samples", 0))
        for name, number in {"step": step, "epoch": 0, "samples": samples, "tokens": 0}.items():
            self.values["progress", name] = number
        self._add_engine(samples)
        if content.get("lr_scheduler") is not None:
            self._add(("lr_scheduler",), content["lr_scheduler"])
        for key in sorted(content.keys() - _OWN_KEYS, key=str):
            self._add(("extra", "client_state", key), content[key])
        self.dropped += [key for key in ("data_sampler", "random_ltd") if content.get(key)]

    def _add_engine(self, samples: int) -> None:
        """Add what an engine counts, where it cannot derive all of it from the progress."""
        skipped = count(self._model.content.get("skipped_steps", 0))
        scaler = self._contents.optimizer[0].loss_scaler
        is_dynamic = scaler.get("dynamic")
        scale = {name: scaler[name] for name in _SCALE if name in scaler} if is_dynamic else {}
        if skipped or scale:
            # DeepSpeed does not save how many micro-batches there were: that is always derived.
            engine = {"global_steps": self._model.step, "micro_steps": 0}
            engine |= {"global_samples": samples, "skipped_steps": skipped}
            self._add(("engine",), {**engine, **({"loss_scale": scale} if scale else {})})

    def _add(self, path: Path, value: Any) -> None:
        """Add a value, or all that a container holds; drop what has no place."""
        try:
            leaves = flatten({"": value}, lambda leaf: isinstance(leaf, StoredTensor))
            found = {(*path, *tail[1:]): self._encode(path, leaf) for tail, leaf in leaves.items()}
        except UnencodableStateError:
            self.dropped.append(path_name(path))
            return
        for inner, leaf in found.items():
            if isinstance(leaf, StoredTensor):
                self.tensors[inner] = whole(self._contents, path_name(inner), leaf)
            else:
                self.values[inner] = leaf

    def _encode(self, path: Path, leaf: Any) -> Any:
        if isinstance(leaf, StoredTensor):
            return leaf
        return Codec().encode(leaf, path_name(path))
