"""Ranks that differ where they must not, and what is shared out where their number changes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_ckpt import CheckpointManager, RankLocal, TrainState
from fsdp_ckpt.dcp import read_memory
from fsdp_ckpt.testing import run_ranks
from tests.multiprocess.test_manager import Holder, outcome, tree


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def drift(root: str) -> list[Any]:
    rank, found = dist.get_rank(), []
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp_ckpt").addHandler(handler)
    torch.manual_seed(0)
    plain = DistributedDataParallel(nn.Linear(3, 4))
    state = TrainState(model=plain, optimizer=trained(plain))
    CheckpointManager(f"{root}/same", state, check_replicas="raise").save(mode="sync")
    if rank == 2:
        state.optimizer.state[plain.module.weight]["exp_avg"][1, 2] += 1e-6  # type: ignore[union-attr]
    loud = CheckpointManager(f"{root}/ddp", state, check_replicas="raise", timeout_s=250)
    found.append(outcome(lambda: loud.save(mode="sync")))
    CheckpointManager(f"{root}/warned", state).save(mode="sync")
    CheckpointManager(f"{root}/off", state, check_replicas="off").save(mode="sync")

    torch.manual_seed(0)
    hybrid = nn.Linear(6, 5)
    fully_shard(hybrid, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    state = TrainState(model=hybrid, optimizer=trained(hybrid))
    CheckpointManager(f"{root}/same-hybrid", state, check_replicas="raise").save(mode="sync")
    if rank == 3:
        hybrid.weight.to_local().data.view(-1)[7] += 1e-6  # type: ignore[union-attr]
    loud = CheckpointManager(f"{root}/hybrid", state, check_replicas="raise", timeout_s=250)
    found.append(outcome(lambda: loud.save(mode="sync")))
    return [*found, [text for text in records if "replicas" in text], tree(f"{root}/ddp")]


def test_drifted_replicas_are_named(tmp_path: Path) -> None:
    """A replica that differs in one bit is an error or a warning that names tensor, ranks and element."""
    values = run_ranks(drift, 4, str(tmp_path)).values
    for rank, (ddp, hybrid, warnings, files) in enumerate(values):
        assert ddp["type"] == "RankFailureError"
        assert "optimizer.state.weight.exp_avg: ranks 0 and 2" in ddp["text"]
        assert "element 5 " in ddp["text"]
        assert hybrid["type"] == "RankFailureError"
        assert "model.weight: ranks 1 and 3" in hybrid["text"]
        assert "element 7 " in hybrid["text"]
        assert len(warnings) == (1 if rank == 0 else 0)
        assert files == []


def share_out(states: list[Any], *, rank: int, world_size: int) -> Any:
    done = [i for state in states for i in state["done"]]
    return {"done": done[rank::world_size], "seen": torch.cat([s["seen"] for s in states])}


def cursor_state(root: str, save: bool) -> Any:
    rank = dist.get_rank()
    data = Holder({"done": [10 * rank, 10 * rank + 1], "seen": torch.full((rank,), rank)})
    state = TrainState(data=data, reshard={"data": share_out})
    with CheckpointManager(root, state, timeout_s=250) as manager:
        if save:
            manager.save(mode="sync")
            return None
        report = manager.restore()
    return data.state["done"], data.state["seen"].tolist(), report.derived, report.preserved


def test_a_reshard_function_shares_out_per_rank_states(tmp_path: Path) -> None:
    """An opaque cursor of each rank, tensors too, goes through the caller's function on another world."""
    run_ranks(cursor_state, 3, str(tmp_path), True)
    values = run_ranks(cursor_state, 2, str(tmp_path), False).values
    for rank, (done, seen, derived, preserved) in enumerate(values):
        assert done == [0, 1, 10, 11, 20, 21][rank::2]
        assert seen == [1, 2, 2]
        assert derived == ("data",)
        assert preserved == ("progress", "rng")


def canonical(value: Any) -> Any:
    """Return nested dicts with sorted keys and tensors as lists, to compare."""
    if isinstance(value, dict):
        return {key: canonical(value[key]) for key in sorted(value)}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def odd_states(root: str) -> list[Any]:
    """What only some ranks have, in kinds and shapes that differ."""
    rank = dist.get_rank()
    mine: dict[str, Any] = {"a": 1} if rank == 0 else {"b": {"c": torch.arange(2)}}
    part = Holder({"mine": mine, "mixed": None if rank == 0 else torch.ones(2)})
    mesh = init_device_mesh("cpu", (2,))
    shard = DTensor.from_local(torch.full((2,), rank), mesh, [Shard(0)], run_check=False)
    own = Holder(RankLocal({"keys": {f"only{rank}": rank}, "shard": shard}))
    manager = CheckpointManager(
        f"{root}/odd", TrainState(extra={"part": part, "own": own}), timeout_s=250
    )
    manager.save(mode="sync")
    before = canonical(part.state), own.state.value["keys"]
    part.state = {}
    manager.restore()
    found: list[Any] = [
        (canonical(part.state), own.state["keys"]) == before,
        own.state["shard"].tolist() == [rank, rank],
    ]
    uneven = DTensor.from_local(
        torch.ones(1 + rank, 2), mesh, [Shard(0)], run_check=False, shape=(3, 2), stride=(2, 1)
    )
    manager = CheckpointManager(
        f"{root}/uneven", TrainState(extra={"u": Holder({"t": uneven})}), timeout_s=250
    )
    found.append(outcome(lambda: manager.save(mode="sync")))
    late = TrainState()
    late.progress.step = 5 + rank
    found.append(
        outcome(lambda: CheckpointManager(f"{root}/late", late, timeout_s=250).save(mode="sync"))
    )
    return [*found, tree(f"{root}/uneven"), tree(f"{root}/late")]


def test_ranks_with_odd_states(tmp_path: Path) -> None:
    """Keys, kinds and shapes of some ranks come back to these; wrong shards and steps are refused."""
    for value in run_ranks(odd_states, 2, str(tmp_path)).values:
        same, shard, uneven, late, files_uneven, files_late = value
        assert same
        assert shard
        assert uneven["type"] == "UnencodableStateError"
        assert "extra.u.t" in uneven["text"]
        assert late["type"] == "MismatchError"
        assert "step 5" in late["text"]
        assert "step 6" in late["text"]
        assert files_uneven == files_late == []


def goes_on_after_damage(root: str) -> list[Any]:
    state = TrainState(extra={"t": Holder({"t": torch.arange(4)})})
    manager = CheckpointManager(root, state, timeout_s=250)
    for _ in range(2):
        state.progress.advance()
        manager.save(mode="sync")
    dist.barrier()
    if dist.get_rank() == 0:
        shard = next(Path(root, "step-000000002").glob("*/rank-00001*"))
        shard.write_bytes(shard.read_bytes()[:-1])
    dist.barrier()
    report = manager.restore()
    state.progress.advance()
    saved = manager.save(mode="sync").wait().step
    return [report.step, [s.step for s in report.skipped], saved, manager.restore().step]


def test_a_damaged_step_can_be_saved_again(tmp_path: Path) -> None:
    """After a fall-back past a damaged checkpoint the run saves that step anew, and resumes from it."""
    for value in run_ranks(goes_on_after_damage, 2, str(tmp_path)).values:
        assert value == [1, [2], 2, 2]


def draws(root: str, save: bool) -> Any:
    state = TrainState()
    manager = CheckpointManager(root, state, timeout_s=250)
    torch.manual_seed(dist.get_rank())
    if save:
        manager.save(mode="sync")
        return torch.rand(4).tolist(), None, None
    report = manager.restore()
    drawn = torch.rand(4).tolist()
    manager.restore()
    return drawn, torch.rand(4).tolist(), report.derived


def test_random_states_on_more_ranks(tmp_path: Path) -> None:
    """Ranks that existed keep their streams; new ones get distinct ones, the same at every restore."""
    saved = run_ranks(draws, 2, str(tmp_path), True).values
    found = run_ranks(draws, 4, str(tmp_path), False).values
    assert [drawn for drawn, _, _ in found[:2]] == [drawn for drawn, _, _ in saved]
    assert all(drawn == again for drawn, again, _ in found)
    assert len({tuple(drawn) for drawn, _, _ in found}) == 4
    assert [derived for _, _, derived in found] == [(), (), ("rng",), ("rng",)]


def reads_ahead(root: str) -> list[Any]:
    rank = dist.get_rank()
    read_memory.LEAST_AHEAD_BYTES = 1
    sharded = nn.Linear(64, 64)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    manager = CheckpointManager(root, TrainState(model=sharded), timeout_s=250)
    manager.save(mode="sync")
    saved = sharded.weight.to_local().clone()  # type: ignore[union-attr]
    extra = {"head": Holder(1)} if rank == 1 else {}
    other = CheckpointManager(root, TrainState(model=sharded, extra=extra), timeout_s=250)
    with torch.no_grad():
        sharded.weight.to_local().fill_(7)  # type: ignore[union-attr]
    refused = outcome(other.restore)
    other.close()
    is_kept = bool((sharded.weight.to_local() == 7).all())  # type: ignore[union-attr]
    manager.restore()
    manager.close()
    return [refused, is_kept, torch.equal(sharded.weight.to_local(), saved)]  # type: ignore[union-attr]


def test_a_rank_that_fits_and_one_that_does_not(tmp_path: Path) -> None:
    """The first one reads its file ahead already; it changes nothing, and raises what the other one does."""
    for refused, is_kept, is_restored in run_ranks(reads_ahead, 2, str(tmp_path)).values:
        assert refused["type"] == "MismatchError"
        assert "head" in refused["text"]
        assert (is_kept, is_restored) == (True, True)
