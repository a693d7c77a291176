"""The optimizer's state by parameter, out of that of flat vectors.

state of a flat vector: moments --segments--> tensors per parameter; step --> one per parameter
groups of flat vectors --> groups of names
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fsdp_ckpt.deepspeed.contents import Contents, OptimizerFile
from fsdp_ckpt.deepspeed.parted import from_flats
from fsdp_ckpt.deepspeed.partitions import Segment
from fsdp_ckpt.deepspeed.tensors import PartedTensor
from fsdp_ckpt.deepspeed.unpickler import StoredTensor
from fsdp_ckpt.errors import CorruptCheckpointError
from fsdp_ckpt.plan.dtypes import itemsize

__all__ = ["OptimizerState"]

Shapes = Mapping[str, tuple[int, ...]]
_CODES = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}


class OptimizerState:
    """What all ranks' files together say of the optimizer.

    Args:
        contents: As opened.
        shapes: Name → shape of what is trained.
        segments: Name → where it lies.
    """

    def __init__(
        self,
        contents: Contents,
        shapes: Shapes,
        segments: Mapping[str, Sequence[Segment]],
    ) -> None:
        self._contents = contents
        self._files = contents.optimizer
        self._shapes = shapes
        self._segments = {name: found for name, found in segments.items() if found}
        groups = self._files[0].param_groups
        self._group_of = {flat: i for i, group in enumerate(groups) for flat in group["params"]}

    def groups(self) -> Iterator[dict[str, Any]]:
        """Yield the groups: hyperparameters and, as ``params``, names."""
        names: dict[int, list[str]] = {}
        for name, found in self._segments.items():
            flat = found[0].flat
            names.setdefault(self._group_of.get(flat, flat), []).append(name)
        groups = self._files[0].param_groups
        for i, of_group in names.items():
            own = groups[i] if groups else {}
            # Fused kernels count steps per group; here every parameter gets the count.
            yield {"params": of_group} | {k: own[k] for k in own.keys() - {"params", "step"}}

    def tensors(self) -> Iterator[tuple[str, str, PartedTensor]]:
        """Yield (name, state key, tensor).

        Raises:
            CorruptCheckpointError: A rank lacks its part, or has come to another step.
            StorageError: The store failed.
        """
        flats = {found[0].flat for found in self._segments.values()}
        steps = {flat: self._step(flat) for flat in flats}
        for name, found in self._segments.items():
            flat = found[0].flat
            for key, value in self._files[found[0].rank].states.get(flat, {}).items():
                if isinstance(value, StoredTensor) and value.shape:
                    what = f"{name}'s {key}"
                    yield (
                        name,
                        key,
                        from_flats(
                            self._contents, what, self._shapes[name], found, self._flats(key)
                        ),
                    )
            step = steps[flat]
            if step is not None:  # as torch.optim keeps it
                content = struct.pack("<f", step)
                yield (
                    name,
                    "step",
                    PartedTensor(stored_dtype="F32", dtype="F32", shape=(), content=content),
                )

    def values(self) -> Iterator[tuple[str, str, Any]]:
        """Yield (name, state key, value) of what is neither per element nor the step."""
        for name, found in self._segments.items():
            for key, value in self._files[found[0].rank].states.get(found[0].flat, {}).items():
                is_moment = isinstance(value, StoredTensor) and value.shape
                if key != "step" and not is_moment:
                    yield name, key, value

    def _flats(self, key: str) -> dict[tuple[int, int], StoredTensor]:
        return {
            (file.rank, flat): state[key]
            for file in self._files
            for flat, state in file.states.items()
            if isinstance(state.get(key), StoredTensor)
        }

    def _step(self, flat: int) -> float | None:
        """Return the step count, which all ranks share; ``None`` where the optimizer keeps none."""
        steps = [self._step_of(file, flat) for file in self._files]
        for file, step in zip(self._files, steps, strict=True):
            if step != steps[0]:
                raise CorruptCheckpointError(
                    f"{file.where}: the optimizer's step is {step}, rank 0's {steps[0]}; the file is of "
                    "another checkpoint, copy the tag's folder anew",
                    rank=file.rank,
                    key=file.key,
                )
        return steps[0]

    def _step_of(self, file: OptimizerFile, flat: int) -> float | None:
        group = self._group_of.get(flat)
        of_group = None if group is None else file.param_groups[group].get("step")
        step = file.states.get(flat, {}).get("step", of_group)
        if isinstance(step, StoredTensor):
            return self._read_number(file, step)
        return float(step) if isinstance(step, int | float) else None

    def _read_number(self, file: OptimizerFile, tensor: StoredTensor) -> float:
        if tensor.num_elements != 1 or tensor.dtype not in _CODES:
            raise CorruptCheckpointError(
                f"{file.where}: a step of dtype {tensor.dtype} and shape {list(tensor.shape)}; copy the file "
                "anew, or take another tag",
                rank=file.rank,
                key=file.key,
            )
        data = bytearray(itemsize(tensor.dtype))
        self._contents.store.read_into(file.key, tensor.byte_offset, memoryview(data))
        return float(struct.unpack(_CODES[tensor.dtype], data)[0])
