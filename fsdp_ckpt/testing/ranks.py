"""Run a function on real ranks: one fresh process each, watched by a deadline.

    run_ranks(fn, 2, path) --start--> rank 0: process_group -> fn(path) -> end    exit code, value, log
                           --start--> rank 1: process_group -> fn(path) -> end    exit code, value, log

Invariant: when :func:`run_ranks` returns or raises, none of its ranks is alive. The ranks meet in a
file of a folder made for this run, so runs next to each other share nothing, no port either. Only this
module's own processes write the values that it unpickles.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import os
import pickle
import random
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing import connection, forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["RankResult", "RanksFailedError", "RanksResult", "over_tcp", "run_ranks"]

LOG_TAIL_LINES = 40
# How long a signalled rank may take to write its stacks and die, on a machine that is busy.
STOP_PATIENCE_S = 60.0
MEETING = {"MASTER_ADDR", "MASTER_PORT"}
PRELOADED = [
    "torch",
    "torch._dynamo",  # by the first optimizer
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "fsdp_ckpt.manager",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """How one rank ended.

    Args:
        rank: 0 <= rank < world size.
        exit_code: Of the process; -n when signal n ended it.
        value: What the function returned, ``None`` where it did not get so far. A rank whose peer was killed
            may have one and still fail, in the barrier that ends the group.
        log: All that the process wrote to stdout and stderr, native code's output included.
        error: Traceback or one line on what went wrong; ``None`` for a rank that returned and exited with 0.
    """

    rank: int
    exit_code: int
    value: Any
    log: str
    error: str | None


class RanksFailedError(AssertionError):
    """Some ranks failed; the message holds each one's exit code and the last lines of its log.

    Args:
        results: Of all ranks, the ones that succeeded too.
    """

    def __init__(self, results: RanksResult) -> None:
        failed = results.failed
        paragraphs = [f"{len(failed)} of {len(results)} ranks failed"]
        for result in failed:
            reason = (result.error or "").rstrip().rpartition("\n")[2]
            tail = "\n".join(result.log.splitlines()[-LOG_TAIL_LINES:])
            where = f"rank {result.rank}, exit code {result.exit_code}"
            paragraphs.append(f"{where}: {reason}\nits log ends with:\n{tail}")
        super().__init__("\n".join(paragraphs))
        self.results = results


class RanksResult(tuple[RankResult, ...]):
    """One :class:`RankResult` per rank, in rank order."""

    @property
    def failed(self) -> list[RankResult]:
        """The ranks that did not return, or exited with a code other than 0."""
        return [result for result in self if result.error is not None]

    @property
    def values(self) -> list[Any]:
        """What the function returned, per rank.

        Raises:
            RanksFailedError: A rank failed.
        """
        if self.failed:
            raise RanksFailedError(self)
        return [result.value for result in self]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What a rank is told. The function goes by name and file: pytest's importlib mode sets no sys.path."""

    module: str
    file: Path
    name: str
    pickled_args: bytes
    world_size: int
    backend: str
    timeout_s: float
    env: dict[str, str]
    folder: Path

    @property
    def init_method(self) -> str:
        """How ranks meet."""
        return "env://" if self.env.keys() >= MEETING else f"file://{self.folder / 'rendezvous'}"

    def path(self, rank: int, suffix: str) -> Path:
        return self.folder / f"rank-{rank}.{suffix}"


def over_tcp() -> dict[str, str]:
    """Return the environment in which ranks meet over TCP, at a port that is free now.

    It is none of those that the system gives to whoever asks for any: such a one could be taken again before
    rank 0 comes to listen.
    """
    try:
        end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except FileNotFoundError:  # not Linux: where they begin on most systems
        end = 32768
    # The program's own random numbers stay as they are.
    for port in random.SystemRandom().sample(range(min(10_000, end - 1000), end), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    raise RuntimeError(f"no port below {end} is free on 127.0.0.1")


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 250.0,
    grace_s: float = 60.0,
    backend: str = "gloo",
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> RanksResult:
    """Call ``fn(*args)`` on ``world_size`` ranks, a process each, with an initialised process group.

    Each rank runs on one torch thread and has ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE`` and
    ``LOCAL_WORLD_SIZE`` set, as under torchrun. Afterwards the group ends as
    :mod:`fsdp_ckpt.ranks.process_groups` states. One thread at a time: to start a process polls all others.

    Args:
        fn: A function at the top level of a module, a test module or a script's ``__main__`` too.
        world_size: Number of ranks.
        *args: Its arguments, picklable, the same for every rank.
        timeout_s: Seconds from the start until all ranks must have ended.
        grace_s: Seconds that the other ranks get to end once one has failed.
        backend: Of ``torch.distributed``.
        env: Environment variables to add, set before torch is imported. With :func:`over_tcp` ranks meet as
            under torchrun; otherwise through a file, by which each of their messages takes milliseconds.
        check: Raise when a rank failed; otherwise the results tell.

    Returns:
        Exit code, value, log and error of each rank.

    Raises:
        RanksFailedError: A rank failed and ``check`` is true, or one was alive at the deadline.
        TypeError: ``fn`` is not a module's top-level function.
    """
    module = sys.modules[fn.__module__]
    if getattr(module, fn.__qualname__, None) is not fn:
        raise TypeError(f"fn must be a function at the top level of a module, found {fn!r}")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = _Job(
            module=module.__name__,
            file=Path(module.__file__ or "").resolve(),
            name=fn.__qualname__,
            pickled_args=pickle.dumps(args),
            world_size=world_size,
            backend=backend,
            timeout_s=timeout_s,
            env=dict(env or {}),
            folder=Path(folder),
        )
        processes = _processes(job)
        try:
            for process in processes:
                process.start()
            stopped, late = _watch(processes, timeout_s, grace_s)
        finally:
            _stop(processes)
        results = RanksResult(
            _collect(job, rank, process.exitcode, stopped.get(rank))
            for rank, process in enumerate(processes)
        )
    if late or (check and results.failed):
        raise RanksFailedError(results)
    return results


def _processes(job: _Job) -> list[BaseProcess]:
    """Make the ranks' processes: fresh ones, which share nothing with this process.

    They are forked from a server that has loaded torch and us, and has no threads: it takes a rank seconds
    of a core. With variables of its own a rank must load torch itself, unless they say just where to meet.
    """
    ranks = range(job.world_size)
    if job.env.keys() - MEETING:
        spawn = get_context("spawn")
        return [spawn.Process(target=_run_rank, args=(job, rank)) for rank in ranks]
    fork = get_context("forkserver")
    fork.set_forkserver_preload(PRELOADED)
    # The server lives on and serves later runs; libraries that torch loads must start no threads in it.
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return [fork.Process(target=_run_rank, args=(job, rank)) for rank in ranks]


def _watch(
    processes: Sequence[BaseProcess], timeout_s: float, grace_s: float
) -> tuple[dict[int, str], bool]:
    """Wait for the ranks; return why those still alive have to be stopped, and whether for the deadline."""
    alive = dict(enumerate(processes))
    end = time.monotonic() + timeout_s
    why, late = f"still alive at the deadline of {timeout_s:g} s", True
    while alive and (left_s := end - time.monotonic()) > 0:
        # At most half a second: a dead rank's forked children may hold its sentinel open.
        ready = connection.wait([p.sentinel for p in alive.values()], min(left_s, 0.5))
        for rank, process in list(alive.items()):
            if process.sentinel in ready:
                process.join()
            if process.exitcode is None:
                continue
            del alive[rank]
            grace_end = time.monotonic() + grace_s
            if process.exitcode != 0 and late and grace_end < end:
                end, late = grace_end, False
                why = f"still alive {grace_s:g} s after rank {rank} ended with exit code {process.exitcode}"
    hung = [rank for rank, process in alive.items() if process.exitcode is None]
    return dict.fromkeys(hung, why), late and bool(hung)


def _stop(processes: Sequence[BaseProcess]) -> None:
    """End those still alive. SIGABRT first: it makes a rank write the stacks of its threads to its log."""
    for number in (signal.SIGABRT, signal.SIGKILL):
        alive = {p.pid: p for p in processes if p.pid is not None and p.exitcode is None}
        for pid in alive:
            os.kill(pid, number)
        for process in alive.values():
            process.join(STOP_PATIENCE_S)


def _collect(job: _Job, rank: int, exit_code: int | None, why_stopped: str | None) -> RankResult:
    def read(suffix: str) -> bytes:
        path = job.path(rank, suffix)
        return path.read_bytes() if path.exists() else b""

    value = read("value")
    error = read("error").decode() or why_stopped
    if not error and not value:
        error = f"the process ended before {job.name} returned"
    elif not error and exit_code != 0:
        error = f"the process failed after {job.name} had returned"
    return RankResult(
        rank=rank,
        exit_code=-signal.SIGKILL if exit_code is None else exit_code,
        value=pickle.loads(value) if value else None,
        log=read("log").decode(errors="replace"),
        error=error,
    )


def _run_rank(job: _Job, rank: int) -> None:
    """Main function of a rank's process. What the job's function raises ends it with exit code 1."""
    _write_to_log(job.path(rank, "log"))
    for prefix in ("", "LOCAL_"):
        os.environ |= {f"{prefix}RANK": str(rank), f"{prefix}WORLD_SIZE": str(job.world_size)}
    os.environ |= {"OMP_NUM_THREADS": "1", **job.env}
    # Not at the top: the variables above must be set before torch is loaded.
    import torch

    from fsdp_ckpt.ranks.process_groups import process_group

    torch.set_num_threads(1)
    # What was loaded so far is no garbage: to look through it at the end takes a rank a quarter of a second.
    gc.freeze()
    try:
        with process_group(
            job.backend,
            init_method=job.init_method,
            rank=rank,
            world_size=job.world_size,
            timeout_s=job.timeout_s,
        ):
            _call(job, rank)
    except BaseException:
        job.path(rank, "error").write_text(traceback.format_exc())
        raise


def _write_to_log(path: Path) -> None:
    log_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log_fd, stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a TextIOWrapper here
    os.close(log_fd)
    # A crash or a stop at the deadline leaves the stacks of all threads in the log, and no core file.
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _call(job: _Job, rank: int) -> None:
    """Call the job's function and keep its value in a file: the group ends with no reference to it."""
    fn = getattr(_find_module(job.module, job.file), job.name)
    # After the import, for the classes that the arguments may need from the function's module.
    value = pickle.dumps(fn(*pickle.loads(job.pickled_args)))
    # Complete or absent, also for a rank that is killed while it writes.
    job.path(rank, "part").write_bytes(value)
    job.path(rank, "part").rename(job.path(rank, "value"))


def _find_module(name: str, file: Path) -> ModuleType:
    """Import by name where that leads to ``file``, else by path under the same name, for pickle to find."""
    if name == "__main__":
        return sys.modules[name]
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    # pickle looks for the packages above it too.
    for parent in accumulate(name.split(".")[:-1], "{}.{}".format):
        sys.modules.setdefault(parent, ModuleType(parent))
    spec.loader.exec_module(module)
    return module
