"""What saves in the background may take: memory, file descriptors."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.few_ranks, pytest.mark.slow]

MIB = 1 << 20


def run(program: str, *arguments: object, timeout_s: int = 280) -> list[str]:
    """Run a program in an interpreter of its own; return its output, one line each."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "MALLOC_ARENA_MAX": "2"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


MEMORY = """
    import sys, threading, time
    import torch
    from torch import nn
    from fsdp_ckpt import CheckpointManager, SaveOptions, TrainState

    def memory(pid="self"):
        fields = dict(line.split(":") for line in open(f"/proc/{pid}/status") if ":" in line)
        return {name: int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem")}

    root, mode, writer, in_flight = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    model = nn.ParameterList([nn.Parameter(torch.ones(1 << 20)) for _ in range(12)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = TrainState(model=model, optimizer=optimizer)
    torch.stack([p.detach() for p in list(model)[:2]]).sum()
    start = sum(memory().values())
    peak, stop = [0, 0], threading.Event()

    def watch():
        while not stop.wait(0.002):
            peak[0] = max(peak[0], sum(memory().values()))
            if manager.writer_pid:
                # The image is shared memory; what is anonymous is the writer's own.
                peak[1] = max(peak[1], memory(manager.writer_pid)["RssAnon"])

    options = SaveOptions(mode=mode, writer=writer, max_in_flight=in_flight)
    with CheckpointManager(root, state, options=options) as manager:
        watcher = threading.Thread(target=watch)
        watcher.start()
        after = []
        for _ in range(15):
            state.progress.advance()
            info = manager.save().wait()
            after.append(sum(memory().values()))
        stop.set()
        watcher.join()
    print(info.num_bytes, start, peak[0], peak[1], sum(memory().values()))
    print(*after)
"""


def measured(tmp_path: Path, mode: str, writer: str) -> tuple[list[int], list[int]]:
    first, second = run(MEMORY, tmp_path / f"{mode}-{writer}", mode, writer, 1)
    return [int(n) for n in first.split()], [int(n) for n in second.split()]


def slope(values: list[int]) -> float:
    """Least squares, per save; the first saves fill buffers."""
    later = values[3:]
    mean_x, mean_y = (len(later) - 1) / 2, sum(later) / len(later)
    top = sum((x - mean_x) * (y - mean_y) for x, y in enumerate(later))
    return top / sum((x - mean_x) ** 2 for x in range(len(later)))


def test_a_save_needs_one_image_and_no_second_copy(tmp_path: Path) -> None:
    """Fifteen saves: peak at most the images in flight and 64 MB, no growth, all given back at the end."""
    for mode in ("async", "lazy"):
        (shard, start, peak, writers_own, end), after = measured(tmp_path, mode, "process")
        assert shard > 140 * MIB  # or the bounds would bound nothing
        assert peak - start <= shard + 64 * MIB, mode
        assert slope(after) < 2 * MIB, (mode, after)
        assert end - start <= 64 * MIB, mode
        # Interpreter, libraries and parts in flight: far from a second image.
        assert MIB < writers_own < 64 * MIB, mode


DESCRIPTORS = """
    import resource, sys
    import torch
    from torch import nn
    from fsdp_ckpt import CheckpointManager, SaveOptions, TrainState

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    model = nn.ParameterList([nn.Parameter(torch.full((3,), float(i))) for i in range(2000)])
    state = TrainState(model=model)
    with CheckpointManager(sys.argv[1], state, options=SaveOptions(max_in_flight=2)) as manager:
        for _ in range(5):
            state.progress.advance()
            manager.save()
        with torch.no_grad():
            for parameter in model:
                parameter.zero_()
        print(manager.restore().step)
        print(all(bool((p == i).all()) for i, p in enumerate(model)))
"""


def test_few_descriptors_are_enough(tmp_path: Path) -> None:
    """Two thousand tensors under ``ulimit -n 256``."""
    assert run(DESCRIPTORS, tmp_path) == ["5", "True"]


def test_the_writer_starts_without_torch() -> None:
    """It is up in tens of milliseconds because it imports little."""
    program = """
        import sys
        import fsdp_ckpt.writer.__main__
        print([name for name in ("torch", "numpy.testing", "transformers") if name in sys.modules])
    """
    assert run(program) == ["[]"]
