"""What two checkpoints do not have in common: to the bit, whatever their layouts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fsdp_ckpt import CheckpointManager, TrainState
from fsdp_ckpt.cli import main
from fsdp_ckpt.compare import streaming
from fsdp_ckpt.compare.numbers import distance
from fsdp_ckpt.hf import reshard
from tests.hf_files import write_files
from tests.layouts import Live, Net
from tests.unit.test_hf_reshard import rank_state, save_as_ranks, save_trained
from tests.weights import DAMAGES, Kinds, save

Capture = pytest.CaptureFixture[str]


def found(capsys: Capture, *argv: object) -> tuple[int, dict[str, Any]]:
    """Run ``diff --json``; return exit code and document."""
    code = main(["diff", *map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_checkpoint_and_its_reload_are_the_same(tmp_path: Path, capsys: Capture) -> None:
    """Also where the reload was saved by another job, under another root and attempt."""
    save_trained(tmp_path / "run")
    live = Live.of(Net(1))
    with CheckpointManager(tmp_path / "run", live.state) as manager:
        manager.restore()
    with CheckpointManager(tmp_path / "again", live.state) as manager:
        manager.save(mode="sync")
    code, document = found(capsys, tmp_path / "run", tmp_path / "again")
    assert (code, document["is_empty"], document["not_compared"]) == (0, True, [])
    assert document["num_tensors"] > 20
    assert document["num_values"] > 5
    assert main(["diff", str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    assert capsys.readouterr().out.endswith("nothing differs\n")


def test_of_two_steps_it_names_what_changed(tmp_path: Path, capsys: Capture) -> None:
    """Tensors with how far they are apart, values with both sides; nothing else."""
    model = nn.Linear(3, 2)
    first = save(tmp_path, model, 5)
    with torch.no_grad():
        model.weight[1, 2] += 0.5
    second = save(tmp_path, model, 6)
    code, document = found(capsys, first, second)
    assert code == 1
    (tensor,) = document["tensors"]
    assert (tensor["name"], tensor["num_differing"], tensor["num_elements"]) == (
        "model.weight",
        1,
        6,
    )
    assert tensor["max_abs"] == pytest.approx(0.5, rel=1e-5)
    assert tensor["rms"] == pytest.approx(0.5 / 6**0.5, rel=1e-5)
    assert document["values"] == [{"name": "progress.step", "rank": None, "a": "5", "b": "6"}]
    assert main(["diff", str(first), str(second)]) == 1
    text = capsys.readouterr().out
    assert "model.weight" in text
    assert "model.bias" not in text
    assert text.endswith("1 tensor(s) and 1 value(s) differ\n")


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_layouts_are_no_difference(tmp_path: Path, capsys: Capture, world_size: int) -> None:
    """A checkpoint that was written anew for other ranks holds the same; changed bits are found there too."""
    save_trained(tmp_path / "run")
    reshard(tmp_path / "run", tmp_path / "out", world_size=world_size)
    code, document = found(capsys, tmp_path / "run", tmp_path / "out")
    assert (code, document["is_empty"]) == (0, True)
    save_trained(tmp_path / "later", num_steps=3)
    code, document = found(capsys, tmp_path / "later", tmp_path / "out")
    assert code == 1
    names = {tensor["name"] for tensor in document["tensors"]}
    assert {"model.first.weight", "optimizer.state.first.weight.exp_avg"} <= names
    assert "model.frozen.weight" not in names


def test_the_document_has_the_fields_that_are_written_down(tmp_path: Path, capsys: Capture) -> None:
    """Every field stands in docs/commands.md."""
    first, second = save_trained(tmp_path / "a"), save_trained(tmp_path / "b", num_steps=3)
    text = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    section = text[text.index("## `diff") : text.index("## `plan")]
    document = found(capsys, first, second)[1]
    for name in (*document, *document["tensors"][0], *document["values"][0]):
        assert re.search(rf"\b{name}\b", section), name


def test_parts_make_up_the_whole(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a batch holds, from one element to all tensors, the numbers are the same."""
    save_trained(tmp_path / "run")
    reshard(tmp_path / "run", tmp_path / "out", world_size=3)
    save_trained(tmp_path / "later", num_steps=3)
    expected = found(capsys, tmp_path / "later", tmp_path / "out", "--what", "model")[1]
    assert expected["tensors"]
    for batch_bytes in (8, 100):
        monkeypatch.setattr(streaming, "BATCH_BYTES", batch_bytes)
        document = found(capsys, tmp_path / "later", tmp_path / "out", "--what", "model")[1]
        for tensor, other in zip(document["tensors"], expected["tensors"], strict=True):
            assert tensor == {**other, "rms": pytest.approx(other["rms"], rel=1e-12)}


def test_what_each_rank_has_is_compared_by_rank(tmp_path: Path, capsys: Capture) -> None:
    """Random states of ranks that both have; of the others it says that they were not."""
    save_as_ranks(tmp_path / "two", [rank_state(rank) for rank in range(2)])
    save_as_ranks(tmp_path / "three", [rank_state(rank) for rank in range(3)])
    code, document = found(capsys, tmp_path / "two", tmp_path / "three")
    assert (code, len(document["not_compared"])) == (0, 1)
    assert document["not_compared"][0].startswith("rng of rank 2: only in ")
    swapped = [rank_state(0), rank_state(7)]
    save_as_ranks(tmp_path / "other", swapped)
    code, document = found(capsys, tmp_path / "two", tmp_path / "other")
    assert code == 1
    assert [(t["name"], t["rank"]) for t in document["tensors"]] == [("rng.torch", 1)]
    assert [(v["name"], v["rank"]) for v in document["values"]] == [("rng.python", 1)]


def test_ranks_that_vary_are_compared_with_what_all_have(tmp_path: Path, capsys: Capture) -> None:
    """A rank without a copy of its own has the global content, a tensor or a value."""
    states = [{"count": torch.tensor([rank]), "note": rank} for rank in range(2)]
    save_as_ranks(tmp_path / "varying", states)
    save_as_ranks(tmp_path / "equal", [states[0], states[0]])
    code, document = found(capsys, tmp_path / "equal", tmp_path / "varying")
    assert code == 1
    assert [(t["name"], t["rank"], t["max_abs"]) for t in document["tensors"]] == [("count", 1, 1)]
    assert document["values"] == [{"name": "note", "rank": 1, "a": "0", "b": "1"}]


def test_against_hugging_face_files(tmp_path: Path, capsys: Capture) -> None:
    """By the names that consolidation gives; with what any library wrote, a tied name too."""
    torch.manual_seed(0)
    model = Kinds()
    save(tmp_path / "run", model)
    assert main(["consolidate", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    for pair in (("run", "hf"), ("hf", "run"), ("hf", "hf")):
        code, document = found(capsys, *(tmp_path / name for name in pair))
        assert (code, document["what"], document["num_values"]) == (0, "model", 0)
        assert document["num_tensors"] == len(model.tensors())
    tensors = model.tensors()
    tensors["head.weight"] = tensors.pop("embedding.weight")
    write_files(tmp_path / "tied", tensors, num_files=2)
    for pair in (("run", "tied"), ("tied", "run")):
        assert found(capsys, *(tmp_path / name for name in pair))[0] == 0
    tensors["linear.weight"] = tensors["linear.weight"].float()
    tensors["mask"] = torch.zeros(4, dtype=torch.bool)
    del tensors["scale"]
    write_files(tmp_path / "changed", tensors)
    code, document = found(capsys, tmp_path / "run", tmp_path / "changed")
    assert code == 1
    assert document["only_in_a"] == [{"name": "scale", "rank": None}]
    by_name = {tensor["name"]: tensor for tensor in document["tensors"]}
    assert by_name.keys() == {"linear.weight", "mask"}
    wider = by_name["linear.weight"]
    assert (wider["dtype_a"], wider["dtype_b"], wider["num_differing"]) == ("BF16", "F32", 0)
    assert (by_name["mask"]["shape_b"], by_name["mask"]["max_abs"]) == ([4], None)


def test_filters_choose_what_is_compared(tmp_path: Path, capsys: Capture) -> None:
    """By part and by pattern; values too."""
    first, second = save_trained(tmp_path / "a"), save_trained(tmp_path / "b", num_steps=3)
    assert found(capsys, first, second, "--include", "model.frozen.*")[0] == 0
    code, document = found(capsys, first, second, "--include", "progress.*")
    assert (code, document["num_tensors"]) == (1, 0)
    assert [v["name"] for v in document["values"]] == ["progress.step"]
    document = found(capsys, first, second, "--what", "optimizer", "--exclude", "*.step")[1]
    assert {t["name"].rpartition(".")[2] for t in document["tensors"]} == {"exp_avg", "exp_avg_sq"}


def test_nothing_to_compare_is_no_equality(tmp_path: Path, capsys: Capture) -> None:
    """A pattern with a slip of the pen in it does not say that all is well."""
    save(tmp_path / "run", nn.Linear(2, 2))
    for what in (["--include", "modle.*"], ["--what", "ema"]):
        assert main(["diff", str(tmp_path / "run"), str(tmp_path / "run"), *what]) == 2
        assert "nothing to compare" in capsys.readouterr().err


F32 = np.float32


@pytest.mark.parametrize(
    ("dtype", "a", "b", "expected"),
    [
        ("F32", F32([np.nan, 1, -0.0]), F32([np.nan, 1, -0.0]), (0, 0, 0.0)),
        ("F32", F32([0.0, 1]), F32([-0.0, 1]), (1, 0, 0.0)),
        ("F32", F32([np.nan, 1]), F32([2, 1.5]), (2, 1, 0.5)),
        ("F32", F32([np.inf]), F32([-np.inf]), (1, 1, 0.0)),
        ("I64", np.int64([2**62, -(2**63)]), np.int64([2**62 + 1, 2**63 - 1]), (2, 0, 2.0**64)),
        ("U8", np.uint8([1, 250]), np.uint8([3, 1]), (2, 0, 249.0)),
        ("BOOL", np.uint8([1, 0]), np.uint8([1, 1]), (1, 0, 1.0)),
        ("F16", np.float16([1, 2]), np.float16([1, 2.5]), (1, 0, 0.5)),
        ("C64", np.complex64([3 + 4j]), np.complex64([0]), (1, 0, 5.0)),
        ("C128", np.complex128([1j, 2]), np.complex128([1j, 5]), (1, 0, 3.0)),
    ],
)
def test_equal_bits_are_equal(
    dtype: str, a: np.ndarray, b: np.ndarray, expected: tuple[int, int, float]
) -> None:
    """NaN equals itself, -0.0 is not 0.0, and no distance overflows."""
    stored = [np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1) for x in (a, b)]
    result = distance(stored[0], dtype, stored[1], dtype)
    assert (result.num_differing, result.num_non_finite, result.max_abs) == expected


def test_a_dtype_without_known_numbers_is_compared_by_bits(tmp_path: Path) -> None:
    """Two numbers in a byte are not taken apart."""
    stored = np.uint8([[1], [2]]), np.uint8([[1], [3]])
    result = distance(stored[0], "F4_E2M1_X2", stored[1], "F4_E2M1_X2")
    assert (result.num_differing, result.has_numbers) == (1, False)


@pytest.mark.parametrize("kind", [*DAMAGES, "torn", "empty", "nowhere"])
@pytest.mark.parametrize("side", [0, 1])
def test_damage_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: Capture, kind: str, side: int
) -> None:
    """Never taken for a difference; whichever side it is on."""
    model = nn.ParameterDict({"big": torch.zeros(2000)})
    whole, other = save(tmp_path / "whole", model), save(tmp_path / "other", model)
    if kind == "torn":
        (other / "manifest.json").unlink()
    elif kind in DAMAGES:
        DAMAGES[kind](next(other.rglob("*.safetensors")))
    else:
        other = tmp_path / kind
        if kind == "empty":
            other.mkdir()
    argv = [str(whole), str(other)] if side else [str(other), str(whole)]
    assert main(["diff", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fsdp-ckpt: error: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err


def test_ties_are_seen_on_either_side(tmp_path: Path, capsys: Capture) -> None:
    """One tensor under two names equals two of the same content; only the tie differs."""
    torch.manual_seed(0)
    tied = Kinds()
    save(tmp_path / "tied", tied)
    untied = Kinds()
    untied.load_state_dict(tied.state_dict())
    untied.head.weight = nn.Parameter(tied.head.weight.detach().clone())
    state = TrainState(model=untied)
    state.progress.step = 5
    with CheckpointManager(tmp_path / "untied", state) as manager:
        manager.save(mode="sync")
    assert found(capsys, tmp_path / "tied", tmp_path / "untied", "--what", "model")[0] == 0
    code, document = found(capsys, tmp_path / "untied", tmp_path / "tied", "--exclude", "rng.*")
    assert (code, document["tensors"]) == (1, [])
    assert document["only_in_a"] == [{"name": "tied", "rank": None}]  # no ties: an empty value
    assert document["only_in_b"] == [{"name": "tied.head.weight", "rank": None}]
