"""What layouts promise beside exact values: what is stored, who writes and reads what, what is refused."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fsdp_ckpt import CheckpointManager, MismatchError, TrainState
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.testing import run_ranks
from tests.bits import bits
from tests.layouts import Layouts, Live, differences, live_parts, reference, whole_parameters

Wrap = Callable[[nn.Module], nn.Module]

pytestmark = pytest.mark.timeout(600)  # the first test waits for the ranks of all


def sharded(mesh: Any = None) -> Wrap:
    return lambda module: fully_shard(
        module, mesh=mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    )


def flat(*, use_orig_params: bool) -> Wrap:
    return lambda module: FullyShardedDataParallel(
        module, use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )


def run_of(model: nn.Module) -> TrainState:
    """Give a model an optimizer that has not stepped."""
    return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))


def train(state: TrainState, batch: torch.Tensor) -> TrainState:
    assert state.model is not None
    assert state.optimizer is not None
    state.model(batch).square().sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    return state


def save(state: TrainState, root: str) -> None:
    with CheckpointManager(root, state, timeout_s=250) as manager:
        manager.save(mode="sync")


def restore(state: TrainState, root: str, **how: Any) -> Any:
    """Return the report, or the text of a refusal."""
    with CheckpointManager(root, state, timeout_s=250) as manager:
        try:
            return manager.restore(**how)
        except MismatchError as e:
            return str(e)


def num_bytes_of(state: TrainState) -> int:
    """Return the bytes of all tensors that this rank holds."""
    return sum(part.numel() * part.element_size() for _, _, part in live_parts(state))


# --- tied parameters ---


class Words(nn.Module):
    """An embedding that may be the head as well, and two layers that are equal but not one."""

    def __init__(self, seed: int, *, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.left = nn.Linear(6, 6, bias=False)
        self.right = nn.Linear(6, 6, bias=False)
        self.right.load_state_dict(self.left.state_dict())
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        return self.head(self.left(hidden) + self.right(hidden))

    @property
    def shares_weight(self) -> bool:
        """Whether head and embedding are one tensor now."""
        a, b = self.embed.weight, self.head.weight
        return a is b or (not isinstance(a, DTensor) and a.data_ptr() == b.data_ptr())


def shares_weight(model: nn.Module) -> bool:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return bool(model.shares_weight)


def stored_bytes(root: str) -> Counter[str]:
    """Return name → bytes of every tensor of the model's and optimizer's, in all files together."""
    checkpoint = Checkpoint.open(LocalStore(f"{root}/step-000000000"))
    entries = (e for rank in range(4) for e in checkpoint.header(rank).layout.entries)
    found: Counter[str] = Counter()
    for entry in entries:
        found[entry.name] += entry.num_bytes
    return found


TIED = {"fsdp2": sharded(), "orig": flat(use_orig_params=True), "flat": flat(use_orig_params=False)}


def ties(root: str) -> dict[str, Any]:
    ids, found = torch.arange(11), {}
    for name, wrap in TIED.items():
        folder = f"{root}/{name}"
        source = train(run_of(wrap(Words(0, is_tied=True))), ids)
        save(source, folder)
        whole = whole_parameters(source.model)
        stored = stored_bytes(folder)
        seen: dict[str, Any] = {
            "head": [n for n in stored if "head" in n],
            "bytes": {n: stored[f"model.{n}.weight"] for n in ("embed", "left", "right")},
            "moment": stored["optimizer.state.embed.weight.exp_avg"],
        }
        for target_name, target_wrap in {**TIED, "plain": lambda net: net}.items():
            target = train(run_of(target_wrap(Words(1, is_tied=True))), ids)
            restore(target, folder)
            now = whole_parameters(target.model)
            equal = now.keys() == whole.keys() and all(torch.equal(now[n], whole[n]) for n in now)
            seen[target_name] = equal and shares_weight(target.model)
        for target_name, target_wrap in {**TIED, "plain": lambda net: net}.items():
            target = TrainState(model=target_wrap(Words(1, is_tied=False)))
            told = restore(target, folder, allow_unexpected=["optimizer.*"])
            now = whole_parameters(target.model)
            right = torch.equal(now["head.weight"], whole["embed.weight"])
            right &= torch.equal(now["embed.weight"], whole["embed.weight"])
            seen[f"untied {target_name}"] = told if isinstance(told, str) else right
            seen[f"untied {target_name} shares"] = shares_weight(target.model)
        seen["untied optimizer"] = restore(run_of(wrap(Words(1, is_tied=False))), folder)
        save(train(run_of(wrap(Words(0, is_tied=False))), ids), f"{folder}-untied")
        seen["tied from untied"] = restore(run_of(wrap(Words(1, is_tied=True))), f"{folder}-untied")
        found[name] = seen
    return found


# --- one name on several meshes ---


def namesakes(root: str) -> list[str]:
    """Save a model whose two columns of ranks hold different tensors under the same names."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    torch.manual_seed(grid["columns"].get_local_rank())
    model = fully_shard(nn.Linear(4, 4), mesh=grid["rows"])
    with pytest.raises(MismatchError) as refusal:
        save(TrainState(model=model), root)
    return [str(refusal.value), *os.listdir(root)] if os.path.isdir(root) else [str(refusal.value)]


# --- bytes written ---


class Wide(nn.Module):
    """Layers of one size, large enough that headers do not count."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def half_sharded(mesh: Any) -> Wrap:
    """Shard every other layer."""

    def wrap(net: nn.Module) -> nn.Module:
        for layer in net.layers[::2]:
            fully_shard(layer, mesh=mesh)
        return net

    return wrap


def half_cut(net: nn.Module) -> nn.Module:
    """Cut every other layer, tensor-parallel."""
    plan = {str(i): ColwiseParallel() for i in range(0, len(net.layers), 2)}
    parallelize_module(net.layers, init_device_mesh("cpu", (4,)), plan)
    return net


def writes(root: str) -> dict[str, int]:
    """Save in layouts that hold tensors more than once; return the bytes of the state."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    wraps: dict[str, Wrap] = {
        "hsdp": sharded(grid),
        "ddp": DistributedDataParallel,
        "fsdp2 and plain": half_sharded(grid["shard"]),
        "hsdp and plain": half_sharded(grid),
        "tp and plain": half_cut,
    }
    for name, wrap in wraps.items():
        state = run_of(wrap(Wide(8, 512)))
        assert state.model is not None
        assert state.optimizer is not None
        for parameter in state.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        state.optimizer.step()
        save(state, f"{root}/{name}")
    whole = train(run_of(Wide(8, 512)), torch.ones(1, 512))
    return {name: num_bytes_of(whole) for name in wraps}


# --- bytes read ---


@contextmanager
def counted_reads() -> Iterator[Counter[str]]:
    """Count the bytes that this process reads, by file."""
    counts: Counter[str] = Counter()
    read, read_into = LocalStore.read, LocalStore.read_into

    def counting_read(store: LocalStore, key: str, max_bytes: int | None = None) -> bytes:
        data = read(store, key, max_bytes)
        counts[key] += len(data)
        return data

    def counting_read_into(
        store: LocalStore, key: str, byte_offset: int, buffer: memoryview
    ) -> None:
        counts[key] += len(buffer)
        read_into(store, key, byte_offset, buffer)

    LocalStore.read, LocalStore.read_into = counting_read, counting_read_into  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        LocalStore.read, LocalStore.read_into = read, read_into  # type: ignore[method-assign]


def readers() -> dict[str, Wrap]:
    shape = (dist.get_world_size() // 2, 2)
    grid = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return {
        "fsdp2": sharded(),
        "fsdp1": flat(use_orig_params=False),
        "hsdp": sharded(grid),
    }


# Momentum's state is as large as its parameters; AdamW has a step count of one element per parameter too.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
}


def reads(root: str, *, is_saving: bool) -> dict[str, Any]:
    """Restore with counted reads; return what this rank has read and what it needs, in bytes."""
    found = {}
    for optimizer, make in OPTIMIZERS.items():
        for name, wrap in readers().items():
            model = wrap(Wide(4, 1024))
            state = TrainState(model=model, optimizer=make(model.parameters()))
            folder = f"{root}/{optimizer}-{name}"
            if is_saving:
                save(train(state, torch.ones(1, 1024)), folder)
            dist.barrier()
            with counted_reads() as counts:
                restore(state, folder)
            found[f"{optimizer}-{name}"] = {
                "ranks": sorted(
                    int(Path(key).name[5:10]) for key in counts if key.endswith(".safetensors")
                ),
                "read": sum(counts.values()),
                "needed": num_bytes_of(state),
            }
    return found


# --- changed models ---


class Classes(nn.Module):
    def __init__(self, seed: int, head: str = "head", vocabulary: int = 11) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Embedding(vocabulary, 6)
        self.add_module(head, nn.Linear(6, 3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.body(ids)
        for layer in list(self.children())[1:]:
            hidden = layer(hidden)
        return hidden


def changed(root: str) -> dict[str, Any]:
    ids, found = torch.arange(11), {}
    for name, wrap in TIED.items():
        folder = f"{root}/{name}"
        source = train(run_of(wrap(Classes(0))), ids)
        save(source, folder)
        body = whole_parameters(source.model)["body.weight"]
        seen: dict[str, Any] = {}
        for stepped in (False, True):
            target = run_of(wrap(Classes(1, head="new")))
            if stepped:
                train(target, ids)
            before = whole_parameters(target.model)
            report = restore(
                target,
                folder,
                allow_missing=["model.new.*", "optimizer.new.*"],
                allow_unexpected=["model.head.*", "optimizer.state.head.*"],
            )
            if isinstance(report, str):
                seen[f"head, {stepped}"] = report
                continue
            after = whole_parameters(target.model)
            optimizer = target.collect()["optimizer"]["state"]
            seen[f"head, {stepped}"] = {
                "missing": sorted(report.missing),
                "body": torch.equal(after["body.weight"], body),
                "new": torch.equal(after["new.weight"], before["new.weight"]),
                "with state": sorted(optimizer),
                "moments": sum(
                    float(part.abs().sum())
                    for path, _, part in live_parts(target)
                    if path.startswith("optimizer.state.new.") and path.endswith("exp_avg")
                ),
            }
        grown = train(run_of(wrap(Classes(1, vocabulary=13))), ids)
        there = [(name, box, bits(part)) for name, box, part in live_parts(grown)]
        seen["grown"] = restore(grown, folder)
        seen["untouched"] = there == [(n, box, bits(part)) for n, box, part in live_parts(grown)]
        found[name] = seen
    return found


def uneven_steps(root: str) -> list[str]:
    """Save a state whose tensors were stepped unequally often; load it as one flat parameter."""
    ids = torch.arange(11)
    model = Classes(0)
    state = train(run_of(model), ids)
    model.body.requires_grad_(False)
    save(train(state, ids), root)
    fresh, stepped = (run_of(TIED["flat"](Classes(1))) for _ in range(2))
    return [restore(fresh, root), restore(train(stepped, ids), root)]


# --- after an evaluation ---


def after_evaluation(root: str) -> list[str]:
    """Save and restore models that a forward without backward has left gathered."""
    layouts, failures = Layouts(), []
    x = torch.ones(2, 5)
    for name in layouts.names():
        if name == "pipeline":
            continue
        source = layouts.attach(name, layouts.build(name, seed=0))
        source.step()
        with torch.no_grad():
            expected = source.model(x)
        save(source.state, f"{root}/{name}")
        model = layouts.build(name, seed=1)
        built = layouts.attach(name, model)
        with torch.no_grad():
            model(x)
        live = Live(model, built.optimizer, TrainState(model=model, optimizer=built.optimizer))
        restore(live.state, f"{root}/{name}")
        with torch.no_grad():
            if not torch.equal(live.model(x), expected):
                failures.append(f"{name}: forward uses what was there before")
        failures += [f"{name}: {found}" for found in differences(live, reference(1))]
    return failures


# --- the runs: one with 4 ranks, one with 2 ---


def on_4_ranks(root: str) -> dict[str, Any]:
    parts = {
        "ties": ties,
        "namesakes": namesakes,
        "writes": writes,
        "changed": changed,
        "uneven steps": uneven_steps,
        "evaluated": after_evaluation,
    }
    found = {name: part(f"{root}/{name}") for name, part in parts.items()}
    return {**found, "reads": reads(f"{root}/reads", is_saving=True)}


def on_2_ranks(root: str) -> dict[str, Any]:
    return reads(f"{root}/reads", is_saving=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("promises")


@pytest.fixture(scope="module")
def found(root: Path) -> list[dict[str, Any]]:
    """Return what each of 4 ranks has seen."""
    return run_ranks(on_4_ranks, 4, str(root), timeout_s=500).values


@pytest.fixture(scope="module")
def found_by_half(root: Path, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what each of 2 ranks has read of what 4 have saved."""
    return run_ranks(on_2_ranks, 2, str(root), timeout_s=500).values


# --- the promises ---


def test_tied_parameters_are_stored_once_and_stay_tied(found: list[dict[str, Any]]) -> None:
    """One tensor under two names is one in the checkpoint; equal tensors that are separate are two."""
    for rank in found:
        for seen in rank["ties"].values():
            assert seen["head"] == []
            assert seen["moment"] == 11 * 6 * 4
            assert seen["bytes"] == {"embed": 11 * 6 * 4, "left": 6 * 6 * 4, "right": 6 * 6 * 4}
            assert [seen[target] for target in (*TIED, "plain")] == [True] * 4


def test_tied_and_untied_give_right_values_or_a_clear_error(found: list[dict[str, Any]]) -> None:
    """Untying copies the one tensor into both, or names it; tying two stored tensors is refused."""
    for rank in found:
        for seen in rank["ties"].values():
            assert [seen[f"untied {target}"] for target in ("fsdp2", "plain")] == [True, True]
            assert not any(seen[f"untied {target} shares"] for target in (*TIED, "plain"))
            for target in ("orig", "flat"):
                assert "head.weight: one tensor with embed.weight" in seen[f"untied {target}"]
            assert "optimizer.head.weight: missing" in seen["untied optimizer"]
            told = "embed.weight and head.weight are one tensor here, 2 in the checkpoint"
            assert told in seen["tied from untied"]


def test_namesakes_are_not_taken_for_replicas(found: list[dict[str, Any]]) -> None:
    """Different tensors of one name on different meshes are refused before anything is written."""
    for rank in found:
        (told,) = rank["namesakes"]
        assert "model.weight: ranks 0 and 1" in told
        assert "hold different content under this name" in told


@pytest.mark.parametrize(
    "layout", ["hsdp", "ddp", "fsdp2 and plain", "hsdp and plain", "tp and plain"]
)
def test_what_several_ranks_hold_is_written_once(
    root: Path, found: list[dict[str, Any]], layout: str
) -> None:
    """All files together hold the state once, under 1 % more, and every rank writes its share."""
    files = [path for path in (root / "writes" / layout).rglob("*") if path.is_file()]
    state_bytes = found[0]["writes"][layout]
    assert state_bytes < sum(path.stat().st_size for path in files) < 1.01 * state_bytes
    shards = [path.stat().st_size for path in files if path.suffix == ".safetensors"]
    assert len(shards) == 4
    assert 0.9 * state_bytes / 4 < min(shards)
    assert max(shards) < 1.1 * state_bytes / 4


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_layout_reads_only_its_own_file(
    found: list[dict[str, Any]], optimizer: str
) -> None:
    """A rank reads its own file and the manifest; of HSDP, the files of its shard."""
    for rank, values in enumerate(found):
        for layout in ("fsdp2", "fsdp1", "hsdp"):
            seen = values["reads"][f"{optimizer}-{layout}"]
            own = [rank % 2, rank % 2 + 2] if layout == "hsdp" else [rank]
            assert set(seen["ranks"]) <= set(own), (layout, seen)
            assert seen["read"] <= 1.02 * seen["needed"], (layout, seen)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_half_the_ranks_read_little_more_than_they_need(
    found_by_half: list[dict[str, Any]], optimizer: str
) -> None:
    """4 ranks' checkpoint is read by 2 with at most 5 % more bytes than they hold."""
    for layout in ("fsdp2", "fsdp1", "hsdp"):
        seen = [values[f"{optimizer}-{layout}"] for values in found_by_half]
        assert sum(s["read"] for s in seen) <= 1.05 * sum(s["needed"] for s in seen), (layout, seen)


@pytest.mark.parametrize("layout", TIED)
def test_a_new_head_starts_empty_while_the_rest_loads(
    found: list[dict[str, Any]], layout: str
) -> None:
    """What is allowed to be missing keeps its live values, without optimizer state."""
    for rank in found:
        for stepped in (False, True):
            seen = rank["changed"][layout][f"head, {stepped}"]
            assert seen["missing"] == [
                "model.new.bias",
                "model.new.weight",
                "optimizer.new.bias",
                "optimizer.new.weight",
            ]
            assert seen["body"]
            assert seen["new"]
            assert seen["moments"] == 0
            # A flat parameter has one state for all its tensors.
            assert layout == "flat" or set(seen["with state"]) <= {"body.weight"}


@pytest.mark.parametrize("layout", TIED)
def test_a_grown_vocabulary_is_refused(found: list[dict[str, Any]], layout: str) -> None:
    """The error has both shapes, and nothing live has changed."""
    for rank in found:
        told = rank["changed"][layout]["grown"]
        assert "model.body.weight: shape [11, 6] in the checkpoint, [13, 6] here" in told
        assert rank["changed"][layout]["untouched"]


def test_one_flat_parameter_takes_one_step_count(found: list[dict[str, Any]]) -> None:
    """Step counts that differ cannot become the one of a flat parameter: an error, by name."""
    for rank in found:
        for told in rank["uneven steps"]:
            assert "optimizer.state.head.weight.step is 2" in told
            assert "use_orig_params=True" in told


def test_a_forward_without_backward_leaves_nothing_stale(found: list[dict[str, Any]]) -> None:
    """A state that was evaluated last is restored to the bit, and computes with what was restored."""
    assert [rank["evaluated"] for rank in found] == [[]] * 4
