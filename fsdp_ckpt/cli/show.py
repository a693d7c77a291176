"""``fsdp-ckpt show CHECKPOINT``: what a checkpoint consists of, from its manifest and one header at most."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, get_args

from fsdp_ckpt.cli.arguments import add_checkpoint, add_json, any_dtype, open_named
from fsdp_ckpt.cli.text import age_text, bar_text, bytes_text, print_json, print_line, print_table
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.errors import MismatchError, NotFoundError
from fsdp_ckpt.hf.selection import What, belongs_to
from fsdp_ckpt.manifest.layout_names import layout_name
from fsdp_ckpt.manifest.schema import TensorRow
from fsdp_ckpt.manifest.tree import Path, path_name
from fsdp_ckpt.plan.image import Entry

if TYPE_CHECKING:
    from fsdp_ckpt.cli.arguments import Commands

__all__ = ["add_parser", "run"]

MAX_VALUE = 60


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "show",
        help="show a checkpoint's tensors, files and values",
        description="Show a checkpoint's tensors, the bytes of each rank, and the values of the state, from "
        "its manifest alone. With a filter: only the tensors and values that pass it.",
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--what",
        choices=get_args(What),
        default="all",
        help="only the model, the optimizer's state, or the averaged model saved as extra['ema']",
    )
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only full names such as 'model.layers.*'; repeatable",
    )
    parser.add_argument(
        "--dtype", type=any_dtype, metavar="DTYPE", help="only tensors of it: bf16, fp32, i64"
    )
    parser.add_argument(
        "--rank", type=int, metavar="N", help="also the state that rank N has of its own"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show; return the exit code."""
    checkpoint = open_named(arguments)
    document = _describe(checkpoint, arguments)
    if arguments.json:
        print_json(document)
    else:
        is_filtered = _is_filtered(arguments)
        _print_head(document)
        _print_tensors(document["tensors"])
        if not is_filtered:
            _print_files(document["files"])
        _print_values(document)
        if document["rank"] is not None:
            _print_rank(document["rank"])
    return 0


def _describe(checkpoint: Checkpoint, arguments: argparse.Namespace) -> dict[str, Any]:
    manifest = checkpoint.manifest
    keeps = _filter(arguments)
    rows = [row for row in manifest.tensors if keeps(row.path)]
    if arguments.dtype is not None:
        rows = [row for row in rows if row.dtype == arguments.dtype]
    values = {} if arguments.dtype is not None else dict(_named(manifest.values.items(), keeps))
    if _is_filtered(arguments) and not rows and not values:
        raise NotFoundError(
            f"{checkpoint.store.url}: nothing passes the filters, of {len(manifest.tensors)} tensors and "
            f"{len(manifest.values)} values; names are full ones, such as model.*"
        )
    return {
        "url": checkpoint.store.url,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "generation": manifest.generation,
        "world_size": manifest.world_size,
        "created": manifest.created,
        "library": manifest.library,
        "num_bytes": sum(file.num_bytes for file in manifest.files),
        "num_tensors": len(manifest.tensors),
        "tensors": [_row_to_json(row) for row in rows],
        "files": [
            {"rank": rank, "name": file.name, "num_bytes": file.num_bytes}
            for rank, file in enumerate(manifest.files)
        ],
        "values": values,
        "rank_local": [path_name(path) for path in manifest.own_paths if keeps(path)],
        "varying": [path_name(path) for path in manifest.varying if keeps(path)],
        "rank": None if arguments.rank is None else _describe_rank(checkpoint, arguments.rank),
    }


def _is_filtered(arguments: argparse.Namespace) -> bool:
    return bool(arguments.include or arguments.dtype) or arguments.what != "all"


def _filter(arguments: argparse.Namespace) -> Callable[[Path], bool]:
    def keeps(path: Path) -> bool:
        name = path_name(path)
        is_named = not arguments.include or any(fnmatchcase(name, p) for p in arguments.include)
        return is_named and belongs_to(path, arguments.what)

    return keeps


def _named(
    values: Iterable[tuple[Path, Any]], keeps: Callable[[Path], bool]
) -> Iterable[tuple[str, Any]]:
    return ((path_name(path), value) for path, value in values if keeps(path))


def _row_to_json(row: TensorRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "dtype": row.dtype,
        "shape": list(row.shape),
        "layout": layout_name(row),
        "num_bytes": row.num_bytes,
    }


def _describe_rank(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """Return what a rank's file holds that is its own; reads the file's header."""
    world_size = checkpoint.manifest.world_size
    if not 0 <= rank < world_size:
        raise MismatchError(
            f"{checkpoint.store.url}: no rank {rank}; it was saved by ranks 0 to {world_size - 1}"
        )
    header = checkpoint.header(rank)
    own = [entry for entry in header.layout.entries if entry.name in header.own]
    return {
        "rank": rank,
        "num_bytes": checkpoint.manifest.files[rank].num_bytes,
        "num_chunks": len(header.layout.entries) - len(own),
        "tensors": [_entry_to_json(entry) for entry in own],
        "values": dict(_named(header.values.items(), lambda path: True)),
    }


def _entry_to_json(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "num_bytes": entry.num_bytes,
    }


def _print_head(document: dict[str, Any]) -> None:
    print_line(document["url"], "bold")
    print_line(
        f"step {document['step']}, attempt {document['attempt']}, generation {document['generation']}, "
        f"{document['world_size']} ranks, {bytes_text(document['num_bytes'])}, "
        f"{age_text(document['created'])} old, written by fsdp_ckpt {document['library']}"
    )


def _print_tensors(tensors: list[dict[str, Any]]) -> None:
    if not tensors:
        return
    print_line()
    rows = [
        (t["name"], t["dtype"], t["shape"], t["layout"], bytes_text(t["num_bytes"]))
        for t in tensors
    ]
    print_table(("TENSOR", "DTYPE", "SHAPE", "LAYOUT", "SIZE"), rows, right=(4,))


def _print_files(files: list[dict[str, Any]]) -> None:
    print_line()
    most = max(file["num_bytes"] for file in files)
    rows = [
        (f["rank"], f["name"], bytes_text(f["num_bytes"]), bar_text(f["num_bytes"] / most))
        for f in files
    ]
    print_table(("RANK", "FILE", "SIZE", ""), rows, right=(0, 2))


def _print_values(document: dict[str, Any]) -> None:
    if document["values"]:
        print_line()
        _print_pairs("VALUE", document["values"])
    for title, field in (("EACH RANK'S OWN", "rank_local"), ("DIFFERENT ON SOME RANKS", "varying")):
        if document[field]:
            print_line()
            print_table((title,), [(name,) for name in document[field]])


def _print_rank(document: dict[str, Any]) -> None:
    print_line()
    print_line(
        f"rank {document['rank']}: {bytes_text(document['num_bytes'])}, {document['num_chunks']} chunks of "
        f"tensors, {len(document['tensors'])} tensors and {len(document['values'])} values of its own",
        "bold",
    )
    if document["tensors"]:
        rows = [
            (t["name"], t["dtype"], t["shape"], bytes_text(t["num_bytes"]))
            for t in document["tensors"]
        ]
        print_table(("ITS OWN TENSOR", "DTYPE", "SHAPE", "SIZE"), rows, right=(3,))
    if document["values"]:
        _print_pairs("ITS OWN VALUE", document["values"])


def _print_pairs(title: str, values: dict[str, Any]) -> None:
    """Print names and values: typed JSON, cut where it is long; ``--json`` prints all of it."""
    rows = []
    for name, value in values.items():
        text = json.dumps(value)
        rows.append((name, text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}..."))
    print_table((title, "IS"), rows)
