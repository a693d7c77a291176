"""Plan checkpoints of a model of Llama 3 405B's shape for many ranks, in one process and without its memory.

    python scripts/simulate_scale.py                          the table, beside DCP's own planner
    python scripts/simulate_scale.py --ranks 16384 --json     one JSON object, without DCP

What runs is the package's own code: what the coordinator does around a save of N ranks, up to the published
manifest; what one saving rank does for a structure that it has not seen before; what one of 3/4 N loading
ranks does, up to the shard headers that it would read next. No tensor exists, and no process group.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from fsdp_ckpt.commit.publish import MANIFEST_KEY, read_manifest
from fsdp_ckpt.commit.receipt import Attempt, ShardReceipt
from fsdp_ckpt.dcp.agreement import agree
from fsdp_ckpt.dcp.load_planner import read_items
from fsdp_ckpt.dcp.save_planner import ShardSavePlanner
from fsdp_ckpt.dcp.summary import Item, Summary
from fsdp_ckpt.dcp.writer import ShardedStorageWriter
from fsdp_ckpt.manifest.schema import shard_name
from fsdp_ckpt.manifest.tree import Path, path_name, path_to_json
from fsdp_ckpt.manifest.typed_json import Json
from fsdp_ckpt.plan.box import Box
from fsdp_ckpt.plan.image import ImageLayout
from fsdp_ckpt.plan.layouts import Mesh, MeshLayout, Placement
from fsdp_ckpt.storage.open import open_store

RANKS = (64, 256, 1024, 4096, 16384)
COLUMNS = (
    *("ranks", "coordinator s", "coordinator MB", "save plan s", "load plan s", "manifest MB"),
    *("DCP's plan s", "DCP's metadata MB"),
)
DCP_LIMIT_S = 60
REPEATS = 5  # the fastest counts: other programs only ever add time

NUM_LAYERS, HIDDEN, FFN, KV, VOCAB = 126, 16384, 53248, 8 * 128, 128256
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
ATTEMPT = "20260131T093000-1b9d6bcd52a1"
DIGEST = "0123456789abcdef"


def parameter_shapes() -> dict[str, tuple[int, ...]]:
    """Return name → shape of every parameter."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(NUM_LAYERS):
        shapes.update({f"model.layers.{i}.{name}.weight": shape for name, shape in LAYER.items()})
    return {**shapes, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def global_values() -> dict[Path, Json]:
    """Return path → value of what all ranks share."""
    names = list(parameter_shapes())
    group = ("optimizer", "param_groups", names[0])
    counts = {("progress", name): 100_000 for name in ("step", "epoch", "samples", "tokens")}
    return {(*group, "params"): names, (*group, "lr"): 8e-5, **counts}


def summary_of(num_ranks: int, num_replicas: int = 1) -> Summary:
    """Return what each rank of a job with FSDP2 and Adam says about its training state.

    Args:
        num_ranks: Ranks of the job.
        num_replicas: More than 1 for HSDP, on a mesh of shape (num_replicas, num_ranks / num_replicas).
    """
    ranks = tuple(range(num_ranks))
    sharded = MeshLayout(Mesh((num_ranks,), ranks), (Placement(0),))
    if num_replicas > 1:
        mesh = Mesh((num_replicas, num_ranks // num_replicas), ranks)
        sharded = MeshLayout(mesh, (Placement(), Placement(0)))
    items: list[Item] = []
    for name, shape in parameter_shapes().items():
        state = ("optimizer", "state", name)
        for path in (("model", name), (*state, "exp_avg"), (*state, "exp_avg_sq")):
            items.append(_tensor(path, shape, sharded))
        items.append(_tensor((*state, "step"), (), None))
    for path in global_values():
        items.append(Item(kind="value", path=path, digest=DIGEST))
    for source in ("python", "numpy", "torch", "cuda"):
        items.append(Item(kind="own", path=("rng", source)))
    return Summary({path_name(item.path): item for item in items})


def _tensor(path: Path, shape: tuple[int, ...], layout: MeshLayout | None) -> Item:
    digest = "" if layout else DIGEST
    return Item(kind="tensor", path=path, dtype="F32", shape=shape, layout=layout, digest=digest)


def receipts_of(num_ranks: int) -> list[Any]:
    """Return what the coordinator hears from every rank once its shard file is durable."""
    num_bytes = 12 * sum(math.prod(shape) for shape in parameter_shapes().values()) // num_ranks
    values = [[path_to_json(path), value] for path, value in global_values().items()]
    steps = {f"optimizer.state.{name}.step": "00" * 4 for name in parameter_shapes()}
    return [
        {
            "file": [shard_name(ATTEMPT, rank, num_ranks), num_bytes, 1_400_832, DIGEST],
            "values": values if rank == 0 else [],
            "inline": steps if rank == 0 else {},
        }
        for rank in range(num_ranks)
    ]


def coordinate(summary: Summary, receipts: list[Any], url: str) -> None:
    """Do what the coordinator does around a save: agree, draft, check with coverage, publish."""
    num_ranks = len(receipts)
    planner = ShardSavePlanner()
    planner.accept(agree([summary] * num_ranks), 0, num_ranks)
    attempt = Attempt(id=ATTEMPT, step=100_000, world_size=num_ranks)
    rows = [ShardReceipt.from_json(receipt) for receipt in receipts]
    ShardedStorageWriter(url).publish(planner.draft_manifest(), attempt, rows)


def plan_save(summary: Summary, num_ranks: int, rank: int) -> ImageLayout:
    """Do what a saving rank does: hash its structure, agree, lay out its image."""
    summary.fingerprint()
    return ImageLayout.pack(agree([summary] * num_ranks).chunks_of(rank))


def plan_load(url: str, live: Summary, rank: int) -> list[ReadItem]:
    """Do what a loading rank does: read and check the manifest, find the stored chunks it needs."""
    rows = {row.name: row for row in read_manifest(open_store(url)).tensors}
    items: list[ReadItem] = []
    for name, item in live.items.items():
        if item.kind == "tensor":
            items.extend(read_items(rows[name], _boxes_of(item, rank)))
    return items


def _boxes_of(item: Item, rank: int) -> list[Box]:
    return item.layout.boxes_of(item.shape, rank) if item.layout else [Box.whole(item.shape)]


def simulate(num_ranks: int, num_replicas: int = 1) -> dict[str, float]:
    """Run all three; every repeat starts from fresh objects, so nothing is remembered between them."""
    loading_ranks = num_ranks * 3 // 4
    with tempfile.TemporaryDirectory() as folder:

        def reports(i: int) -> tuple[Any, ...]:
            return summary_of(num_ranks, num_replicas), receipts_of(num_ranks), f"{folder}/{i}"

        coordinator_s = _fastest(coordinate, reports)
        Mesh.whole.cache_clear()
        tracemalloc.start()
        coordinate(*reports(REPEATS))
        coordinator_mb = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
        url = f"{folder}/{REPEATS}"
        save_plan_s = _fastest(
            plan_save, lambda i: (summary_of(num_ranks, num_replicas), num_ranks, 0)
        )
        load_plan_s = _fastest(
            plan_load, lambda i: (url, summary_of(loading_ranks, num_replicas), 1)
        )
        manifest_bytes = open_store(url).size(MANIFEST_KEY)
    return {
        "coordinator_s": round(coordinator_s, 4),
        "coordinator_mb": round(coordinator_mb, 1),
        "save_plan_s": round(save_plan_s, 4),
        "load_plan_s": round(load_plan_s, 4),
        "manifest_bytes": manifest_bytes,
    }


def _fastest(action: Callable[..., object], arguments: Callable[[int], tuple[Any, ...]]) -> float:
    """Return the seconds of the fastest repeat.

    As ``timeit`` does it, without the cyclic collector: that comes at some numbers of ranks and not at
    others, and what it then costs (0.1 s here) is for all that the process has imported.
    """
    seconds = math.inf
    for i in range(REPEATS):
        given = arguments(i)
        Mesh.whole.cache_clear()
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        action(*given)
        seconds = min(seconds, time.perf_counter() - start)
        gc.enable()
    return seconds


def dcp_plans(num_ranks: int) -> list[SavePlan]:
    """Return what DCP's default planner gathers from all ranks for the same state."""
    tensors = [i for i in summary_of(num_ranks).items.values() if i.kind == "tensor"]
    properties = TensorProperties(dtype=torch.float32)
    mappings = {path_name(item.path): item.path for item in tensors}

    def write_items(item: Item, rank: int) -> Iterator[WriteItem]:
        kind = WriteItemType.SHARD if item.layout else WriteItemType.TENSOR
        for box in _boxes_of(item, rank):
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            index = MetadataIndex(path_name(item.path), chunk.offsets)
            data = TensorWriteData(chunk, properties, torch.Size(item.shape))
            yield WriteItem(index, kind, tensor_data=data)

    return [
        SavePlan([w for item in tensors for w in write_items(item, rank)], planner_data=mappings)
        for rank in range(num_ranks)
    ]


def simulate_dcp(num_ranks: int) -> dict[str, float]:
    """Run DCP's global plan, without the gathering of the plans before it; and pickle its metadata."""
    plans = dcp_plans(num_ranks)
    signal.alarm(DCP_LIMIT_S)  # ends this process
    start = time.perf_counter()
    _, metadata = DefaultSavePlanner().create_global_plan(plans)
    seconds = time.perf_counter() - start
    signal.alarm(0)
    return {"dcp_plan_s": round(seconds, 2), "dcp_metadata_bytes": len(pickle.dumps(metadata))}


def main() -> int:
    """Print the table, or one line of JSON per number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--replicas", type=int, default=1, help="of HSDP; 1 is FSDP")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dcp", action="store_true", help="only DCP's own planner, as JSON")
    args = parser.parse_args()
    if args.json or args.dcp:
        for num_ranks in args.ranks:
            found = simulate_dcp(num_ranks) if args.dcp else simulate(num_ranks, args.replicas)
            print(json.dumps(found))
        return 0
    print(f"| {' | '.join(COLUMNS)} |\n|{' ---: |' * len(COLUMNS)}")
    dcp_s_per_rank = 0.0  # it grows with the ranks or faster
    for num_ranks in args.ranks:
        ours = _run("--json", "--ranks", str(num_ranks), "--replicas", str(args.replicas))
        dcp = None
        if ours is None:
            return 1
        if dcp_s_per_rank * num_ranks < DCP_LIMIT_S:
            dcp = _run("--dcp", "--ranks", str(num_ranks))
            dcp_s_per_rank = math.inf if dcp is None else dcp["dcp_plan_s"] / num_ranks
        cells = [
            f"{num_ranks:,}",
            f"{ours['coordinator_s']:.2f}",
            f"{ours['coordinator_mb']:.0f}",
            f"{ours['save_plan_s']:.2f}",
            f"{ours['load_plan_s']:.2f}",
            f"{ours['manifest_bytes'] / 1e6:.2f}",
            "-" if dcp is None else f"{dcp['dcp_plan_s']:.1f}",
            "-" if dcp is None else f"{dcp['dcp_metadata_bytes'] / 1e6:.0f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
    return 0


def _run(*arguments: str) -> dict[str, float] | None:
    """Run this script in a process of its own, for clean memory; ``None`` where it did not finish."""
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        return None
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    sys.exit(main())
