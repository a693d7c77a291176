"""What two sides do not have in common, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_ckpt.hf.selection import What

__all__ = ["Absence", "Difference", "TensorDifference", "ValueDifference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A tensor or value that one side lacks.

    Args:
        name: Its name.
        rank: Whose own it is; ``None`` for one of all ranks.
    """

    name: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor that is not the same on both sides.

    Args:
        name: Its name.
        rank: Whose own it is; ``None`` for one of all ranks.
        dtype_a: On the first side.
        dtype_b: On the second one.
        shape_a: On the first side.
        shape_b: On the second one.
        num_elements: Compared; 0 where the shapes differ.
        num_differing: Those whose bits differ; of two dtypes, whose numbers do.
        num_non_finite: Those of them of which one is infinite or no number; not in what follows.
        max_abs: Largest distance of two elements; ``None`` where the dtype's numbers are not known here.
        rms: Root of the mean square of the distances, over all elements.
    """

    name: str
    rank: int | None
    dtype_a: str
    dtype_b: str
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    num_elements: int = 0
    num_differing: int = 0
    num_non_finite: int = 0
    max_abs: float | None = None
    rms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """A value that is not the same on both sides.

    Args:
        name: Its name.
        rank: Whose own it is; ``None`` for one of all ranks.
        a: On the first side, as typed JSON, cut at 200 characters.
        b: On the second one.
    """

    name: str
    rank: int | None
    a: str
    b: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What differs.

    Args:
        a: The first side's folder.
        b: The second one's.
        what: What was compared.
        num_tensors: Tensors of both sides whose elements were compared.
        num_bytes: Bytes of these on the first side.
        num_values: Values of both sides.
        only_in_a: What the second side lacks.
        only_in_b: What the first side lacks.
        tensors: Those that differ.
        values: Those that differ.
        not_compared: What only the ranks of one side have for themselves, a line each; no difference.
    """

    a: str
    b: str
    what: What
    num_tensors: int = 0
    num_bytes: int = 0
    num_values: int = 0
    only_in_a: tuple[Absence, ...] = ()
    only_in_b: tuple[Absence, ...] = ()
    tensors: tuple[TensorDifference, ...] = ()
    values: tuple[ValueDifference, ...] = ()
    not_compared: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        return not (self.only_in_a or self.only_in_b or self.tensors or self.values)
