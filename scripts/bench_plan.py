"""Time the plan of a save whose structure an earlier save had: `python scripts/bench_plan.py --json`.

The state is a training state of some 4,000 DTensors, sharded by FSDP2 on a mesh of one rank and planned as on
two: values and plain tensors are digested for the comparison between ranks. The ranks' exchange and the copy
of the tensors are not in the time. Prints the median of many repeats, in time of the one thread that plans:
it waits for nothing, so that this is what a clock shows where nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_ckpt import TrainState, process_group
from fsdp_ckpt.dcp.agreement import Agreement, agree
from fsdp_ckpt.dcp.contents import Contents
from fsdp_ckpt.dcp.save_planner import ShardSavePlanner

NUM_LAYERS, REPEATS = 333, 50


def training_state() -> TrainState:
    """Return a state of 4 parameters per layer, after one optimizer step."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(NUM_LAYERS))
    )
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return TrainState(model=model, optimizer=optimizer, lr_scheduler=schedule)


def plan(
    planner: ShardSavePlanner, state: TrainState, agreement: Agreement | None
) -> tuple[float, Contents]:
    """Plan once; return the seconds, and what this rank writes."""
    collected = state.collect()
    start = time.thread_time()
    planner.set_up(collected, rank=0, world_size=2)
    _ = planner.structure, planner.content()
    planner.accept(agreement or agree([planner.summary()] * 2), 0, 2)
    contents = planner.contents()
    return time.thread_time() - start, contents


def measure() -> dict[str, float]:
    """Plan again and again, with the state stepping in between."""
    state, planner = training_state(), ShardSavePlanner()
    _, contents = plan(planner, state, None)
    seconds = []
    for _ in range(REPEATS):
        state.progress.advance(samples=8)
        again_s, again = plan(planner, state, planner.agreement)
        if again.layout is not contents.layout:
            raise AssertionError("planned anew, though the structure is the same")
        seconds.append(again_s)
        planner.forget()
    num_tensors = len(planner.agreement.tensors)
    return {
        "plan_ms_per_1000_tensors": round(statistics.median(seconds) * 1e6 / num_tensors, 3),
        "tensors": num_tensors,
    }


def main() -> int:
    """Measure in a process group of one rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        init = f"file://{folder}/rendezvous"
        with process_group("gloo", init_method=init, rank=0, world_size=1):
            found = measure()
    if args.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:32} {value:g}" for name, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
