"""What goes into a consolidation and what comes out: the rows of the table in docs/consolidation.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from fsdp_ckpt import (
    AlreadyCommittedError,
    CheckpointError,
    CheckpointManager,
    MismatchError,
    NotFoundError,
    TrainState,
    UnencodableStateError,
)
from fsdp_ckpt.hf import consolidate
from fsdp_ckpt.hf.copying import CopyOptions
from fsdp_ckpt.hf.selection import Selection
from tests.bits import bits
from tests.weights import INDEX, load

TABLE = Path(__file__).parents[2] / "docs" / "consolidation.md"
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row.

    Args:
        state: What is saved: a model, or all that a training state takes.
        comes_out: The tensors of the output, or what the error says.
        error: Which error it is.
        options: Of the consolidation.
        left_out: First parts of the names that the report has.
        num_files: Weight files in the output.
    """

    state: Callable[[], nn.Module | dict[str, Any]]
    comes_out: Tensors | str = ""
    error: type[CheckpointError] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    num_files: int = 1


def holding(**tensors: torch.Tensor) -> Callable[[], nn.Module]:
    """Return what makes a module whose buffers these are."""

    def make() -> nn.Module:
        module = nn.Module()
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor)
        return module

    return make


def kept(tensor: torch.Tensor, **options: Any) -> Case:
    """A tensor that comes out as it is."""
    return Case(state=holding(it=tensor), comes_out={"it": tensor}, **options)


def cast(source: torch.Tensor, dtype: str, target: torch.dtype, **options: Any) -> Case:
    """A tensor that comes out as torch converts it."""
    return Case(
        state=holding(it=source),
        comes_out={"it": source.to(target)},
        options={"selection": Selection(dtype=dtype), **options},
    )


def selected(comes_out: Tensors | str, error: Any = None, **options: Any) -> Case:
    """Three tensors, of which a selection is made."""
    return Case(
        state=holding(a=A, b=B, **{"c_d": C}),
        comes_out=comes_out,
        error=error,
        options={"selection": Selection(**options)},
    )


class Tied(nn.Module):
    """One tensor under several names, in parameters."""

    def __init__(self, *, ways: int, is_frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Embedding(4, 3)
        self.first.weight = nn.Parameter(A.clone(), requires_grad=not is_frozen)
        for i in range(1, ways):
            head = nn.Linear(3, 4, bias=False)
            head.weight = self.first.weight
            self.add_module(f"again{i}", head)


class Extra(nn.Linear):
    """A module with a state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"scale": 0.5}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"scale": 0.5}


def frozen() -> nn.Module:
    module = nn.Module()
    module.it = nn.Parameter(A.clone(), requires_grad=False)
    return module


def twins() -> nn.Module:
    return nn.ParameterDict({"one": A.clone(), "other": A.clone()})


def passing() -> nn.Module:
    module = holding(stays=A)()
    module.register_buffer("passes", B, persistent=False)
    return module


def extra() -> nn.Module:
    module = Extra(3, 4, bias=False)
    module.weight = nn.Parameter(A.clone())
    return module


def averaged() -> dict[str, Any]:
    return {"model": twins(), "extra": {"ema": AveragedModel(frozen())}}


def trained() -> dict[str, Any]:
    model = nn.ParameterDict({"it": A.clone()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model["it"].grad = torch.ones(4, 3)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


A = torch.arange(12.0).reshape(4, 3) / 7
B = torch.arange(5)
C = torch.tensor([1.0, 2.0])
WIDE = torch.linspace(-3, 3, 64, dtype=torch.float64)
HUGE = torch.tensor([1.0, 1e5, -1e6])
EDGES = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-45, 65504.0, 0.1])
NAMES = {"a": A, "b": B, "c_d": C}

CASES: dict[str, Case] = {
    "float64": kept(WIDE),
    "float32": kept(EDGES),
    "float16": kept(EDGES.half()),
    "bfloat16": kept(EDGES.bfloat16()),
    "float8_e4m3fn": kept(WIDE.to(torch.float8_e4m3fn)),
    "float8_e5m2": kept(WIDE.to(torch.float8_e5m2)),
    "complex64": kept(torch.complex(EDGES, EDGES.flip(0))),
    "int64": kept(torch.tensor([2**62, -1])),
    "int32": kept(torch.tensor([2**30, -1], dtype=torch.int32)),
    "int16": kept(torch.tensor([2**14, -1], dtype=torch.int16)),
    "int8": kept(torch.tensor([127, -128], dtype=torch.int8)),
    "uint8": kept(torch.tensor([0, 255], dtype=torch.uint8)),
    "uint16": kept(torch.tensor([0, 65535], dtype=torch.uint16)),
    "bool": kept(torch.tensor([True, False, True])),
    "complex128": Case(
        state=holding(it=torch.zeros(2, dtype=torch.complex128)),
        comes_out="it: safetensors has no dtype C128",
        error=UnencodableStateError,
    ),
    "float8_e4m3fnuz": Case(
        state=holding(it=WIDE.to(torch.float8_e4m3fnuz)),
        comes_out="it: safetensors has no dtype F8_E4M3FNUZ",
        error=UnencodableStateError,
    ),
    "0-d": kept(torch.tensor(0.1)),
    "(0, 4)": kept(torch.zeros(0, 4)),
    "size 1": kept(torch.full((1, 1, 1), 0.1)),
    "transposed": kept(A.t()),
    "view of a larger tensor": kept(A[1:3, 1:]),
    "expanded": kept(C.expand(3, 2)),
    "larger than a shard": Case(
        state=holding(a=C, big=WIDE, z=C.clone()),
        comes_out={"a": C, "big": WIDE, "z": C},
        options={"max_shard_bytes": 100},
        num_files=3,
    ),
    "as large as a shard": Case(
        state=holding(a=C, b=C.clone(), z=C.clone()),
        comes_out={"a": C, "b": C, "z": C},
        options={"max_shard_bytes": 16},
        num_files=2,
    ),
    "tied, 2 names": Case(state=lambda: Tied(ways=2), comes_out={"first.weight": A}),
    "tied, 3 names": Case(state=lambda: Tied(ways=3), comes_out={"first.weight": A}),
    "tied and frozen": Case(
        state=lambda: Tied(ways=2, is_frozen=True), comes_out={"first.weight": A}
    ),
    "equal, not tied": Case(state=twins, comes_out={"one": A, "other": A}),
    "frozen": Case(state=frozen, comes_out={"it": A}),
    "buffer": Case(state=lambda: nn.BatchNorm1d(2), comes_out=nn.BatchNorm1d(2).state_dict()),
    "buffer, not persistent": Case(state=passing, comes_out={"stays": A}),
    "extra state": Case(
        state=extra, comes_out={"weight": A}, left_out=("_extra_state",)
    ),
    "--dtype of a wider float": cast(WIDE, "F16", torch.float16),
    "--dtype bf16": cast(EDGES, "BF16", torch.bfloat16),
    "--dtype of float8": cast(WIDE.to(torch.float8_e5m2), "F32", torch.float32),
    "--dtype of integers": kept(B, options={"selection": Selection(dtype="BF16")}),
    "--dtype with overflow": Case(
        state=holding(it=HUGE),
        comes_out=r"2 numbers of 1 tensors are too large for F16, most of them in it \(2\)",
        error=MismatchError,
        options={"selection": Selection(dtype="F16")},
    ),
    "--allow-overflow": cast(
        HUGE, "F16", torch.float16, copying=CopyOptions(allow_overflow=True)
    ),
    "--prefix": selected({f"x.{name}": t for name, t in NAMES.items()}, prefix="x."),
    "--rename": selected({"a": A, "b": B, "d.c": C}, rename=((r"(.)_(.)", r"\2.\1"),)),
    "--key-map": selected({"a_a": A, "y": B, "c-d": C}, key_map={"b": "y", "a": "a_a"}, rename=(("_", "-"),)),
    "--key-map of no tensor": selected("1 names that no tensor has: e", MismatchError, key_map={"e": "f"}),
    "--include, --exclude": selected({"a": A}, include=("a", "c*"), exclude=("*_*",)),
    "names that meet": selected("the name of", MismatchError, rename=(("[ab]", "x"),)),
    "--what optimizer": Case(
        state=trained,
        comes_out={"it.momentum_buffer": torch.ones(4, 3)},
        options={"selection": Selection(what="optimizer")},
        left_out=("param_groups",),
    ),
    "--what ema": Case(
        state=averaged, comes_out={"it": A}, options={"selection": Selection(what="ema")}
    ),
    "stale files in OUT": Case(
        state=twins, comes_out={"one": A, "other": A}, options={"overwrite": True}
    ),
    "keys of a base index": Case(
        state=twins,
        comes_out={"one": A, "other": A},
        options={"max_shard_bytes": 48, "config_from": "base"},
        num_files=2,
    ),
}  # fmt: skip


def save(root: Path, made: nn.Module | dict[str, Any]) -> None:
    state = TrainState(**made) if isinstance(made, dict) else TrainState(model=made)
    with CheckpointManager(root, state) as manager:
        manager.save(mode="sync")


def read_all(out: Path, stem: str) -> dict[str, torch.Tensor]:
    if stem != "model":
        (out / f"{stem}.safetensors").rename(out / "model.safetensors")
    return load(out)


@pytest.mark.parametrize("name", CASES)
def test_what_comes_out(tmp_path: Path, name: str) -> None:
    """As the table says, to the bit; an error leaves nothing behind."""
    case, out = CASES[name], tmp_path / "out"
    save(tmp_path / "run", case.state())
    options = prepare(tmp_path, name, dict(case.options))
    if case.error is not None:
        with pytest.raises(case.error, match=str(case.comes_out)):
            consolidate(tmp_path / "run", out, **options)
        assert not out.exists() or list(out.iterdir()) == []
        return
    report = consolidate(tmp_path / "run", out, **options)
    selection = options.get("selection", Selection())
    found = read_all(out, selection.stem)
    expected = case.comes_out
    assert isinstance(expected, Mapping)
    assert {n: bits(t) for n, t in found.items()} == {n: bits(t) for n, t in expected.items()}
    assert tuple({name.partition(".")[0] for name in report.left_out}) == case.left_out
    assert len(report.files) == case.num_files
    if case.num_files > 1:
        index = json.loads((out / INDEX).read_text())
        assert index["weight_map"].keys() == expected.keys()


def prepare(folder: Path, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Make what stands in folders before a run, where the row is about that."""
    stale = {"model-00001-of-00009.safetensors": "", INDEX: '{"weight_map": {"gone": "x"}}'}
    if name == "stale files in OUT":
        (folder / "out").mkdir()
        for file_name, content in stale.items():
            (folder / "out" / file_name).write_text(content)
        with pytest.raises(AlreadyCommittedError, match="not empty"):
            consolidate(folder / "run", folder / "out")
    if "config_from" in options:
        base = folder / options["config_from"]
        base.mkdir()
        for file_name, content in {**stale, "config.json": "{}"}.items():
            (base / file_name).write_text(content)
        options["config_from"] = base
    return options


def test_the_table_is_the_cases() -> None:
    """Every row of the document is tested, and every case is a row."""
    rows = re.findall(r"^\| (\d+) \| ([^|]+?) +\|", TABLE.read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 49))
    assert [name.replace("`", "") for _, name in rows] == list(CASES)


@pytest.mark.parametrize("what", ["optimizer", "ema"])
def test_what_is_not_there_is_named(tmp_path: Path, what: Any) -> None:
    """An error that says what the checkpoint does hold."""
    save(tmp_path / "run", frozen())
    with pytest.raises(NotFoundError, match=rf"no tensors of {what}.*\(model\.it\)"):
        consolidate(tmp_path / "run", tmp_path / "out", selection=Selection(what=what))


def test_all_holds_everything_under_full_names(tmp_path: Path) -> None:
    """Model, moments and whatever else is a tensor that all ranks share."""
    save(tmp_path / "run", trained())
    report = consolidate(tmp_path / "run", tmp_path / "out", selection=Selection(what="all"))
    assert report.files == ("checkpoint.safetensors",)
    assert {"model.it", "optimizer.state.it.momentum_buffer"} <= set(report.keys[report.files[0]])
