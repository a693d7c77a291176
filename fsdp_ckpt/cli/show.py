"""``fsdp-ckpt show CHECKPOINT``: what a checkpoint consists of. Reads the manifest and nothing else."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from fsdp_ckpt.cli.arguments import add_checkpoint, add_json, open_named
from fsdp_ckpt.cli.text import age_text, bytes_text, print_json, print_table
from fsdp_ckpt.manifest.schema import TensorRow
from fsdp_ckpt.manifest.tree import path_name
from fsdp_ckpt.plan.dtypes import itemsize
from fsdp_ckpt.plan.layouts import FlatLayout, ListedLayout

if TYPE_CHECKING:
    from fsdp_ckpt.cli.arguments import Commands

__all__ = ["add_parser", "run"]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "show",
        help="show a checkpoint's tensors, files and values",
        description="Show a checkpoint's tensors, files and names of values, from its manifest alone.",
    )
    add_checkpoint(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show; return the exit code."""
    checkpoint = open_named(arguments)
    manifest = checkpoint.manifest
    document = {
        "url": checkpoint.store.url,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "generation": manifest.generation,
        "world_size": manifest.world_size,
        "created": manifest.created,
        "library": manifest.library,
        "num_bytes": sum(file.num_bytes for file in manifest.files),
        "tensors": [_describe(row) for row in manifest.tensors],
        "files": [
            {"rank": rank, "name": file.name, "num_bytes": file.num_bytes}
            for rank, file in enumerate(manifest.files)
        ],
        "values": [path_name(path) for path in manifest.values],
        "rank_local": [path_name(path) for path in manifest.rank_local],
        "varying": [path_name(path) for path in manifest.varying],
    }
    if arguments.json:
        print_json(document)
    else:
        _print_text(document)
    return 0


def _describe(row: TensorRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "dtype": row.dtype,
        "shape": list(row.shape),
        "layout": _layout_text(row),
        "num_bytes": math.prod(row.shape) * itemsize(row.dtype),
    }


def _layout_text(row: TensorRow) -> str:
    """Return ``S0 over 8``, ``R,S0 over 2x4`` (one placement per axis of the mesh), or who holds it."""
    if isinstance(row.layout, ListedLayout):
        ranks = sorted({rank for rank, _ in row.layout.listed})
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"listed, {len(row.layout.listed)} chunks"
    if isinstance(row.layout, FlatLayout):
        shards = row.layout.mesh.shape[1]
        return f"flat over {shards}, {row.layout.shard_elements} elements each"
    if all(placement.dim is None for placement in row.layout.placements):
        return f"rank {row.layout.replica_ranks[row.replica][0]}"
    placements = ",".join(map(str, row.layout.placements))
    return f"{placements} over {'x'.join(map(str, row.layout.mesh.shape))}"


def _print_text(document: dict[str, Any]) -> None:
    print(f"{document['url']}")
    print(
        f"step {document['step']}, attempt {document['attempt']}, generation {document['generation']}, "
        f"{document['world_size']} ranks, {bytes_text(document['num_bytes'])}, "
        f"{age_text(document['created'])} old, written by fsdp_ckpt {document['library']}\n"
    )
    tensors = [
        (t["name"], t["dtype"], t["shape"], t["layout"], bytes_text(t["num_bytes"]))
        for t in document["tensors"]
    ]
    print_table(("TENSOR", "DTYPE", "SHAPE", "LAYOUT", "SIZE"), tensors, right=(4,))
    print()
    files = [(f["rank"], f["name"], bytes_text(f["num_bytes"])) for f in document["files"]]
    print_table(("RANK", "FILE", "SIZE"), files, right=(0, 2))
    for title, field in (
        ("VALUES", "values"),
        ("RANK-LOCAL", "rank_local"),
        ("VARYING", "varying"),
    ):
        if document[field]:
            print(f"\n{title}")
            print("\n".join(document[field]))
