"""What does not fit is refused whole: all of it in one error, before anything is read, written or changed."""

from __future__ import annotations

import collections
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fsdp_ckpt import (
    AlreadyCommittedError,
    CheckpointManager,
    ClosedError,
    CorruptCheckpointError,
    MismatchError,
    RestoreReport,
    ResumableSampler,
    TrainState,
    UnencodableStateError,
)
from tests.bits import bits, live_bits, refused


class Value:
    """A part that holds plain data."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


class Job:
    """A model of the given tensors, with AdamW after one step, and parts."""

    def __init__(self, root: Path, shapes: dict[str, tuple[int, ...]], **options: Any) -> None:
        dtypes = options.pop("dtypes", {})
        self.model = nn.Module()
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.rand(shape, dtype=dtypes.get(name, torch.float32)))
            self.model.register_parameter(name, parameter)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters() if options.pop("stepped", True) else ():
            parameter.grad = torch.rand_like(parameter)
        self.optimizer.step()
        self.extra = options.pop("extra", {})
        self.state = TrainState(
            model=self.model, optimizer=self.optimizer, extra=self.extra, **options
        )
        self.manager = CheckpointManager(root, self.state)

    def bits(self) -> dict[str, Any]:
        return live_bits(self.model, self.optimizer, progress=self.state.progress, **self.extra)


def files_of(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


SAVED = {"kept": (2, 3), "resized": (2, 4), "retyped": (3,), "gone": (2,)}
LIVE = {"kept": (2, 3), "resized": (4, 2), "retyped": (3,), "new": (2,)}
DIFFERENCES = {
    "missing": ["model.new: missing", "optimizer.new: missing", "extra.new: missing"],
    "unexpected": [
        "model.gone: in the checkpoint, not here",
        "optimizer.state.gone.exp_avg: in the checkpoint, not here",
        "extra.gone: in the checkpoint, not here",
    ],
    "shape": ["model.resized: shape [2, 4] in the checkpoint, [4, 2] here"],
    "cast": ["model.retyped: dtype F32 in the checkpoint, BF16 here"],
}
DOORS: dict[str, dict[str, Any]] = {
    "missing": {"allow_missing": ["*.new"]},
    "unexpected": {"allow_unexpected": ["*.gone", "*.gone.*"]},
    "cast": {"allow_cast": True},
}


def saved_and_live(root: Path) -> tuple[Job, Job]:
    saved = Job(root, SAVED, extra={"gone": Value(1)})
    saved.manager.save(mode="sync")
    dtypes = {"retyped": torch.bfloat16}
    live = Job(root, LIVE, dtypes=dtypes, stepped=False, extra={"new": Value(2)})
    return saved, live


def test_all_differences_come_in_one_error(tmp_path: Path) -> None:
    """Missing, unexpected, resized and retyped: each named with what was expected and found."""
    _, live = saved_and_live(tmp_path)
    with refused(MismatchError, live) as caught:
        live.manager.restore()
    for words in (w for of_kind in DIFFERENCES.values() for w in of_kind):
        assert words in str(caught.value)
    assert "kept" not in str(caught.value)
    assert caught.value.step == 0


@pytest.mark.parametrize("door", DOORS)
def test_a_door_opens_for_its_own_kind_only(tmp_path: Path, door: str) -> None:
    """What one option allows is no longer named; everything else still is."""
    _, live = saved_and_live(tmp_path)
    with refused(MismatchError, live) as caught:
        live.manager.restore(**DOORS[door])
    for kind, lines in DIFFERENCES.items():
        for words in lines:
            assert (words in str(caught.value)) is (kind != door)


def test_no_door_leads_to_another_shape(tmp_path: Path) -> None:
    """A changed shape is refused with every option set."""
    _, live = saved_and_live(tmp_path)
    with refused(MismatchError, live) as caught:
        live.manager.restore(allow_missing=["*"], allow_unexpected=["*"], allow_cast=True)
    assert "1 difference:" in str(caught.value)
    assert DIFFERENCES["shape"][0] in str(caught.value)


def restore_through_all_doors(saved: Job, live: Job) -> RestoreReport:
    report = live.manager.restore(**{k: v for door in DOORS.values() for k, v in door.items()})
    assert bits(live.model.kept) == bits(saved.model.kept)
    return report


def test_what_went_through_is_reported(tmp_path: Path) -> None:
    """The report lists what is missing, left out and cast, and nothing else; the rest is restored."""
    saved = Job(
        tmp_path, {n: s for n, s in SAVED.items() if n != "resized"}, extra={"gone": Value(1)}
    )
    saved.manager.save(mode="sync")
    shapes = {n: s for n, s in LIVE.items() if n != "resized"}
    dtypes = {"retyped": torch.bfloat16}
    live = Job(tmp_path, shapes, dtypes=dtypes, stepped=False, extra={"new": Value(2)})
    new = bits(live.model.new)
    report = restore_through_all_doors(saved, live)
    assert sorted(report.missing) == ["extra.new", "model.new", "optimizer.new"]
    moments = [f"optimizer.state.gone.{key}" for key in ("exp_avg", "exp_avg_sq", "step")]
    assert sorted(report.unexpected) == ["extra.gone", "model.gone", *moments]
    assert report.cast == {"model.retyped": ("F32", "BF16")}
    assert bits(live.model.new) == new
    assert bits(live.model.retyped) == bits(saved.model.retyped.bfloat16())
    assert live.extra["new"].value == 2


def test_data_is_compared_before_it_is_read(tmp_path: Path) -> None:
    """A checkpoint whose every data byte is wrong is still a mismatch; only the fitting one is damaged."""
    saved, live = saved_and_live(tmp_path)
    (shard,) = tmp_path.rglob("*.safetensors")
    content = bytearray(shard.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start:] = bytes(255 - byte for byte in content[start:])
    shard.write_bytes(content)
    with refused(MismatchError, live):
        live.manager.restore(0)
    with refused(CorruptCheckpointError, saved):
        saved.manager.restore(0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float16),
        (torch.int64, torch.int32),
        (torch.bool, torch.uint8),
    ],
)
def test_no_dtype_changes_unasked(tmp_path: Path, before: torch.dtype, after: torch.dtype) -> None:
    """Another dtype of the same values is a mismatch; with ``allow_cast`` it is torch's own conversion."""
    values = torch.tensor([0, 1, 1, 0])
    model, live = nn.Module(), nn.Module()
    model.register_buffer("x", values.to(before))
    live.register_buffer("x", (1 - values).to(after))
    CheckpointManager(tmp_path, TrainState(model=model)).save(mode="sync")
    manager = CheckpointManager(tmp_path, TrainState(model=live))
    expected = live_bits(live)
    with pytest.raises(MismatchError, match=r"model\.x: dtype"):
        manager.restore()
    assert live_bits(live) == expected
    assert list(manager.restore(allow_cast=True).cast) == ["model.x"]
    assert bits(live.x) == bits(values.to(before).to(after))


def test_moments_of_another_dtype_than_the_live_ones_are_refused(tmp_path: Path) -> None:
    """The optimizer's state is compared like the weights, where the live optimizer has any."""
    saved, live = Job(tmp_path, {"w": (3,)}), Job(tmp_path, {"w": (3,)})
    saved.manager.save(mode="sync")
    state = live.optimizer.state[live.model.w]
    state["exp_avg"] = state["exp_avg"].double()
    state["exp_avg_sq"] = torch.rand(2)
    with refused(MismatchError, live) as caught:
        live.manager.restore()
    assert "optimizer.state.w.exp_avg: dtype F32 in the checkpoint, F64 here" in str(caught.value)
    assert "optimizer.state.w.exp_avg_sq: shape [3] in the checkpoint, [2] here" in str(
        caught.value
    )


def test_a_new_head_starts_with_an_empty_optimizer_state(tmp_path: Path) -> None:
    """A tensor that the checkpoint lacks keeps its live value, gets no moments, and trains on."""
    saved = Job(tmp_path, {"body": (3,)})
    saved.manager.save(mode="sync")
    live = Job(tmp_path, {"body": (3,), "head": (2,)}, stepped=False)
    head = bits(live.model.head)
    report = live.manager.restore(allow_missing=["model.head", "optimizer.head"])
    assert sorted(report.missing) == ["model.head", "optimizer.head"]
    assert bits(live.model.head) == head
    assert list(live.optimizer.state) == [live.model.body]
    live.model.head.grad = torch.ones(2)
    live.optimizer.step()
    assert float(live.optimizer.state[live.model.head]["step"]) == 1.0


def test_an_extra_module_is_compared_like_the_model(tmp_path: Path) -> None:
    """A second module's names, shapes and dtypes are part of the same error."""
    saved = Job(tmp_path, {"w": (1,)}, extra={"ema": nn.Linear(2, 3), "half": nn.Linear(1, 1)})
    saved.manager.save(mode="sync")
    half = nn.Sequential(nn.Linear(1, 1, bias=False)).bfloat16()
    half.weight = half[0].weight
    extra = {"ema": nn.Linear(2, 4), "half": half}
    live = Job(tmp_path, {"w": (1,)}, extra=extra)
    with refused(MismatchError, live) as caught:
        live.manager.restore()
    for words in (
        "extra.ema.weight: shape [3, 2] in the checkpoint, [4, 2] here",
        "extra.half.weight: dtype F32 in the checkpoint, BF16 here",
        "extra.half.0.weight: missing in the checkpoint",
        "extra.half.bias: in the checkpoint, not here",
    ):
        assert words in str(caught.value)


def test_an_extra_module_goes_through_the_same_doors(tmp_path: Path) -> None:
    """A second module may be cast, keep what the checkpoint lacks, and pass over what it lacks itself."""
    saved = Job(tmp_path, {"w": (1,)}, extra={"ema": nn.Linear(2, 3)})
    saved.manager.save(mode="sync")
    ema = nn.Linear(2, 3, bias=False).bfloat16()
    ema.register_buffer("count", torch.tensor(5))
    live = Job(tmp_path, {"w": (1,)}, extra={"ema": ema})
    report = live.manager.restore(
        allow_missing=["extra.ema.count"], allow_unexpected=["extra.ema.bias"], allow_cast=True
    )
    assert report.missing == ("extra.ema.count",)
    assert report.unexpected == ("extra.ema.bias",)
    assert report.cast == {"extra.ema.weight": ("F32", "BF16")}
    assert bits(ema.weight) == bits(saved.extra["ema"].weight.bfloat16())
    assert int(ema.count) == 5


@pytest.mark.parametrize("change", [{"num_samples": 11}, {"seed": 1}, {"shuffle": False}])
def test_another_data_order_is_refused_before_anything_changes(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    """A cursor of another data set, seed or order is one of the differences."""
    saved = Job(tmp_path, {"w": (1,)}, data=ResumableSampler(10))
    saved.manager.save(mode="sync")
    options = {"num_samples": 10, **change}
    live = Job(tmp_path, {"w": (2,)}, data=ResumableSampler(**options))
    with refused(MismatchError, live) as caught:
        live.manager.restore()
    assert "model.w: shape" in str(caught.value)
    assert f"data cursor does not load: {next(iter(change))}" in str(caught.value)


def test_generators_are_compared_by_name(tmp_path: Path) -> None:
    """A generator on one side only is a difference; allowed, it stays as it is."""
    Job(
        tmp_path, {"w": (1,)}, generators={"a": random.Random(1), "b": random.Random(2)}
    ).manager.save(mode="sync")
    generators = {"a": random.Random(3), "c": np.random.default_rng(4)}
    live = Job(tmp_path, {"w": (1,)}, generators=generators)
    kept = bits(generators["c"].bit_generator.state)
    with refused(MismatchError, live) as caught:
        live.manager.restore()
    assert "rng.named.c: missing in the checkpoint" in str(caught.value)
    assert "rng.named.b" in str(caught.value)
    report = live.manager.restore(allow_missing=["rng.named.c"], allow_unexpected=["rng.named.b*"])
    assert report.missing == ("rng.named.c",)
    assert generators["a"].getstate() == random.Random(1).getstate()
    assert bits(generators["c"].bit_generator.state) == kept


def test_a_generator_of_another_kind_is_refused(tmp_path: Path) -> None:
    """A generator's state does not go into one of another kind, and nothing else changes."""
    Job(tmp_path, {"w": (1,)}, generators={"a": random.Random(1)}).manager.save(mode="sync")
    live = Job(tmp_path, {"w": (1,)}, generators={"a": np.random.default_rng(1)})
    with refused(MismatchError, live) as caught:
        live.manager.restore()
    assert "'a' was a random.Random" in str(caught.value)


# --- refused at save ---

Named = collections.namedtuple("Named", "x")

UNENCODABLE: dict[str, tuple[Any, str]] = {
    "object": ({"in": [1, object()]}, "extra.part.in[1]"),
    "function": ({"f": len}, "extra.part.f"),
    "named tuple": ({"n": Named(1)}, "extra.part.n"),
    "object array": ({"a": np.array([None])}, "extra.part.a"),
    "record array": ({"a": np.zeros(2, dtype=[("x", "f4")])}, "extra.part.a"),
    "sparse": ({"t": torch.eye(2).to_sparse()}, "extra.part.t"),
    "meta": ({"t": torch.empty(2, device="meta")}, "extra.part.t"),
    "key above a tensor": ({"d": {(1, 2): torch.rand(1)}}, "extra.part.d"),
    "equal names": ({1: torch.rand(1), "1": 2}, "extra.part.1"),
    "subclass of dict": ({"d": type("Own", (dict,), {})(a=1)}, "extra.part.d"),
}


@pytest.mark.parametrize("name", UNENCODABLE)
def test_what_cannot_be_encoded_is_refused_by_key(tmp_path: Path, name: str) -> None:
    """Nothing is written, not even the root; without the value the same save works."""
    value, key = UNENCODABLE[name]
    job = Job(tmp_path / "run", {"w": (2,)}, extra={"part": Value(value)})
    with pytest.raises(UnencodableStateError) as caught:
        job.manager.save(mode="sync")
    assert caught.value.key == key
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    job.extra["part"].value = {"fine": 1}
    assert job.manager.save(mode="sync").wait().step == 0
    assert job.manager.restore().step == 0


def test_a_reference_cycle_is_refused(tmp_path: Path) -> None:
    """A container that contains itself is an error, not a hang."""
    cycle: dict[str, Any] = {}
    cycle["self"] = [cycle]
    job = Job(tmp_path / "run", {"w": (2,)}, extra={"part": Value(cycle)})
    with pytest.raises(UnencodableStateError, match="containing itself"):
        job.manager.save(mode="sync")
    assert list(tmp_path.iterdir()) == []


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    """Saving a committed step again writes nothing and changes nothing; the next step can be saved."""
    job = Job(tmp_path, {"w": (2,)})
    first = job.manager.save(mode="sync").wait()
    before = files_of(tmp_path)
    job.model.w.data.add_(1)
    with refused(AlreadyCommittedError, job) as caught:
        job.manager.save(mode="sync")
    assert caught.value.step == 0
    assert files_of(tmp_path) == before
    assert job.manager.checkpoints() == [first]
    job.state.progress.advance()
    assert job.manager.save(mode="sync").wait() == job.manager.latest()


def test_a_closed_manager_says_so(tmp_path: Path) -> None:
    """Every later call is refused; closing again is fine."""
    job = Job(tmp_path, {"w": (2,)})
    with job.manager as manager:
        manager.save(mode="sync")
    manager.close()
    for call in (manager.save, manager.restore, manager.checkpoints, manager.latest):
        with refused(ClosedError, job):
            call()


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """Parameters that the model does not have, as after wrapping it too late, have no name."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(MismatchError, match="not the model's"):
        TrainState(model=nn.Linear(2, 2), optimizer=optimizer)
