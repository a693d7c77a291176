"""What differs between two checkpoints, or between a checkpoint and a model's files.

    names ──> only on one side ──> shapes, dtypes, values ──> elements, streamed

Invariant: layouts and numbers of ranks are how a state is stored, not what it is: they are no difference.
What each rank has for itself is compared rank by rank, for the ranks that both sides have.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.compare.difference import (
    Absence,
    Difference,
    TensorDifference,
    ValueDifference,
)
from fsdp_ckpt.compare.sides import Content, Side, Tensor, Value, open_source, side_of
from fsdp_ckpt.compare.streaming import Pair, measure_pairs
from fsdp_ckpt.errors import NotFoundError
from fsdp_ckpt.hf.selection import Selection, What
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.dtypes import itemsize
from fsdp_ckpt.storage.store import Store

__all__ = ["diff"]

MAX_SHOWN = 200


def diff(
    a_store: Store,
    b_store: Store,
    *,
    what: What | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    num_threads: int = 2,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Difference:
    """Compare two checkpoints, or one with a folder of safetensors files.

    Args:
        a_store: A run's root (its newest whole checkpoint is taken), a checkpoint's folder, or a model's.
        b_store: Likewise.
        what: Which part; by default ``all`` of two checkpoints, and ``model`` where one is a model's files.
        include: Patterns of names to compare; all, where there are none.
        exclude: Patterns of names to leave out.
        num_threads: Batches of about 8 MiB per side in work at a time.
        watch: Called with the bytes compared and those to compare.

    Raises:
        NotFoundError: Nothing there at one of the two, or nothing of what is asked for at either.
        CorruptCheckpointError: One of them is damaged.
        StorageError: A store failed.
    """
    sources = open_source(a_store), open_source(b_store)
    if what is None:
        what = "all" if all(isinstance(s, Checkpoint) for s in sources) else "model"
    selection = Selection(what=what, include=tuple(include), exclude=tuple(exclude))
    a, b = (side_of(source, selection) for source in sources)
    if not any(side.contents or side.own_names for side in (a, b)):
        raise NotFoundError(
            f"nothing to compare: of {what}, neither {a.url} nor {b.url} has a name that include and exclude "
            "leave"
        )
    comparison = _Comparison(a, b)
    comparison.compare()
    return comparison.measured(what, num_threads, watch)


@dataclass(slots=True)
class _Comparison:
    """What is known so far."""

    a: Side
    b: Side
    only_in_a: list[Absence] = field(default_factory=list)
    only_in_b: list[Absence] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    tensors: list[TensorDifference] = field(default_factory=list)
    values: list[ValueDifference] = field(default_factory=list)
    num_values: int = 0

    def compare(self) -> None:
        """Compare all but elements."""
        a, b = self.a, self.b
        has_values = not (a.is_model or b.is_model)
        met: set[str] = set()  # on the second side, by the names there
        for name, content in a.contents.items():
            other = b.get(name)
            if isinstance(content, Tensor) or has_values:
                self._judge(name, None, content, other)
                met.add(b.aliases.get(name, name))
        for name, content in b.contents.items():
            if name not in met and (isinstance(content, Tensor) or has_values):
                self._judge(name, None, a.get(name), content)
        self._drop_tied()
        for rank in range(min(a.world_size, b.world_size)):
            self._compare_own(rank)

    def _drop_tied(self) -> None:
        """Take back that a tensor is only on one side where the other has it under a tied name."""
        for only, mine, other in (
            (self.only_in_a, self.a, self.b),
            (self.only_in_b, self.b, self.a),
        ):
            known = {first for name, first in mine.aliases.items() if name in other.contents}
            only[:] = [absence for absence in only if absence.name not in known]

    def _compare_own(self, rank: int) -> None:
        own_a, own_b = self.a.own(rank), self.b.own(rank)
        for name in {**own_a, **own_b}:
            # A rank that has no own copy has what all have.
            mine = own_a.get(name) or self.a.contents.get(name)
            self._judge(name, rank, mine, own_b.get(name) or self.b.contents.get(name))

    def _judge(self, name: str, rank: int | None, a: Content | None, b: Content | None) -> None:
        if a is None:
            self.only_in_b.append(Absence(name=name, rank=rank))
        elif b is None:
            self.only_in_a.append(Absence(name=name, rank=rank))
        elif isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape == b.shape:
                self.pairs.append(Pair(name, rank, a, b))
            else:
                self.tensors.append(_tensor_difference(Pair(name, rank, a, b)))
        else:
            self.num_values += 1
            if not _is_same(a, b):
                self.values.append(ValueDifference(name=name, rank=rank, a=_shown(a), b=_shown(b)))

    def measured(
        self, what: What, num_threads: int, watch: Callable[[int, int], None]
    ) -> Difference:
        """Compare elements, and return all that differs."""
        total = sum(_num_bytes(pair.a) for pair in self.pairs)
        done = 0

        def count(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            watch(min(done, total), total)

        watch(0, total)
        distances = measure_pairs(self.pairs, self.a, self.b, num_threads, count)
        for pair, found in zip(self.pairs, distances, strict=True):
            if found.num_differing or pair.a.dtype != pair.b.dtype:
                self.tensors.append(
                    dataclasses.replace(
                        _tensor_difference(pair),
                        num_elements=found.num_elements,
                        num_differing=found.num_differing,
                        num_non_finite=found.num_non_finite,
                        max_abs=found.max_abs if found.has_numbers else None,
                        rms=found.rms if found.has_numbers else None,
                    )
                )
        return Difference(
            a=self.a.url,
            b=self.b.url,
            what=what,
            num_tensors=len(self.pairs),
            num_bytes=total,
            num_values=self.num_values,
            only_in_a=tuple(self.only_in_a),
            only_in_b=tuple(self.only_in_b),
            tensors=tuple(self.tensors),
            values=tuple(self.values),
            not_compared=tuple(_not_compared(self.a, self.b)),
        )


def _not_compared(a: Side, b: Side) -> Iterable[str]:
    for mine, other in ((a, b), (b, a)):
        if mine.own_names and mine.world_size > other.world_size:
            parts = ", ".join(dict.fromkeys(name.split(".")[0] for name in mine.own_names))
            first, last = other.world_size, mine.world_size - 1
            ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
            yield f"{parts} of {ranks}: only in {mine.url}"


def _num_bytes(tensor: Tensor) -> int:
    return Box.whole(tensor.shape).num_elements * itemsize(tensor.dtype)


def _tensor_difference(pair: Pair) -> TensorDifference:
    return TensorDifference(
        name=pair.name,
        rank=pair.rank,
        dtype_a=pair.a.dtype,
        dtype_b=pair.b.dtype,
        shape_a=pair.a.shape,
        shape_b=pair.b.shape,
    )


def _is_same(a: Content, b: Content) -> bool:
    # As text: in Python 1, 1.0 and True are equal, and so are 0.0 and -0.0.
    return isinstance(a, Value) and isinstance(b, Value) and _text(a) == _text(b)


def _text(value: Value) -> str:
    return json.dumps(value.encoded, sort_keys=True)


def _shown(content: Content) -> str:
    if isinstance(content, Tensor):
        return f"a tensor, {content}"
    text = _text(content)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"
