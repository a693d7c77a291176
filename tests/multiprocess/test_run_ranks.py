"""``run_ranks``: values, failures, kills, deadlines and clean exits of real ranks."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_ckpt.testing import RanksFailedError, run_ranks


@dataclass(frozen=True)
class Note:
    """Of this module, to show that values and arguments may be."""

    text: str
    payload: bytes = b""


def all_reduce_rank(note: Note, num_bytes: int) -> tuple[float, Note]:
    rank = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(rank)
    return rank.item(), Note(f"{note.text} {dist.get_rank()}", b"x" * num_bytes)


def name_environment() -> list[str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "COLOUR")
    return [os.environ[name] for name in names] + [str(torch.get_num_threads())]


def raise_on_rank_one() -> None:
    print("python wrote this")
    os.write(1, b"native code wrote this\n")
    if dist.get_rank() == 1:
        raise ValueError("rank one will not")
    dist.barrier()


def kill_rank_one() -> str:
    if dist.get_rank() == 1:
        print("rank one goes")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError:
        return "saw it"
    return "saw nothing"


def hang_on_rank_zero(pid_file: Path) -> None:
    if dist.get_rank() == 0:
        pid_file.write_text(str(os.getpid()))
        threading.Event().wait()


def hang_while_rank_one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one will not")
    threading.Event().wait()


def leave_early() -> None:
    os._exit(0)


def exit_with_three() -> None:
    sys.exit(3)


def return_a_lock() -> object:
    return threading.Lock()


def train_one_step() -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(torch.randn(4, 16)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss)


def test_values_come_back_per_rank_in_rank_order() -> None:
    """Collectives work, and values come back whatever their size and the module of their class."""
    results = run_ranks(all_reduce_rank, 2, Note("hello"), 8 << 20)
    payload = b"x" * (8 << 20)
    assert results.values == [(1.0, Note("hello 0", payload)), (1.0, Note("hello 1", payload))]
    assert [(r.rank, r.exit_code, r.error) for r in results] == [(0, 0, None), (1, 0, None)]


def test_environment_is_torchrun_like_and_can_be_added_to() -> None:
    """Each rank knows its place, runs on one thread, and gets the variables of ``env``."""
    values = run_ranks(name_environment, 2, env={"COLOUR": "green"}).values
    assert values == [
        ["0", "0", "2", "2", "1", "green", "1"],
        ["1", "1", "2", "2", "1", "green", "1"],
    ]


def test_exception_on_one_rank_is_reported_with_its_traceback() -> None:
    """The error names rank, exit code, exception and what the rank printed, native output included."""
    with pytest.raises(
        RanksFailedError, match="rank 1, exit code 1: ValueError: rank one will not"
    ) as raised:
        run_ranks(raise_on_rank_one, 2)
    assert "in raise_on_rank_one" in str(raised.value)
    failed = raised.value.results[1]
    assert failed.error is not None
    assert failed.error.startswith("Traceback")
    assert "python wrote this\nnative code wrote this\n" in failed.log
    with pytest.raises(RanksFailedError):
        _ = raised.value.results.values


def test_killed_rank_shows_its_signal() -> None:
    """A rank may kill itself; its exit code says so, its log is kept, and the others give their value."""
    results = run_ranks(kill_rank_one, 2, check=False, grace_s=100)
    assert results[1].exit_code == -signal.SIGKILL
    assert results[1].value is None
    assert results[1].error == "the process ended before kill_rank_one returned"
    assert "rank one goes" in results[1].log
    assert results[0].value == "saw it"


def test_deadline_raises_and_names_the_ranks_alive(tmp_path: Path) -> None:
    """A hang is an error even without ``check``: the rank's log shows where, and its process is gone."""
    # However long the ranks take to get there: a deadline that came first is not the one meant here.
    pid_file = tmp_path / "pid"
    for timeout_s in (2, 10, 30, 120):
        pid_file.write_text("")
        with pytest.raises(RanksFailedError) as raised:
            run_ranks(hang_on_rank_zero, 2, pid_file, timeout_s=timeout_s, check=False)
        hung, _ = raised.value.results
        if pid_file.read_text() and "in hang_on_rank_zero" in hung.log:
            break
    assert f"still alive at the deadline of {timeout_s} s" in str(raised.value)
    assert hung.exit_code == -signal.SIGABRT
    assert "in hang_on_rank_zero" in hung.log
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_other_ranks_get_a_grace_once_one_failed() -> None:
    """After a failure nobody waits for the deadline."""
    results = run_ranks(hang_while_rank_one_fails, 2, timeout_s=300, grace_s=1, check=False)
    assert results[1].exit_code == 1
    assert results[0].error == "still alive 1 s after rank 1 ended with exit code 1"


def test_rank_that_never_returned_failed() -> None:
    """Exit code 0 without a return is no success; neither is an exit code of the function's own choice."""
    (left,) = run_ranks(leave_early, 1, check=False)
    assert (left.exit_code, left.error) == (0, "the process ended before leave_early returned")
    (left,) = run_ranks(exit_with_three, 1, check=False)
    assert left.exit_code == 3
    assert left.error is not None


def test_value_that_cannot_be_pickled_is_an_error() -> None:
    """It is reported like any other exception of the rank."""
    with pytest.raises(RanksFailedError, match="cannot pickle"):
        run_ranks(return_a_lock, 1)


def test_function_of_a_module_that_is_on_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks import it by its file, under its own name, so that its classes can be sent."""
    file = tmp_path / "elsewhere.py"
    file.write_text("class Token:\n    pass\n\ndef echo(token):\n    return [token, Token()]\n")
    spec = importlib.util.spec_from_file_location("no_such_package.elsewhere", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "no_such_package", ModuleType("no_such_package"))
    monkeypatch.setitem(sys.modules, spec.name, module)
    (tokens,) = run_ranks(module.echo, 1, module.Token()).values
    assert [type(token) for token in tokens] == [module.Token, module.Token]


def test_only_top_level_functions_are_taken() -> None:
    """What a spawned process could not import is refused before any process starts."""
    with pytest.raises(TypeError, match="top level of a module"):
        run_ranks(lambda: None, 1)


@pytest.mark.parametrize("repetition", range(6))
def test_exits_after_training_are_clean(repetition: int) -> None:
    """Ranks that trained an FSDP2 model leave with exit code 0, every time."""
    results = run_ranks(train_one_step, 2 + 2 * (repetition % 2))
    assert len(set(results.values)) == 1
    assert [result.exit_code for result in results] == [0] * len(results)
