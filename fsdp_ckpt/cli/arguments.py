"""What several commands' arguments have in common."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from fsdp_ckpt.cli.text import warn
from fsdp_ckpt.commit.catalog import SkippedCheckpoint
from fsdp_ckpt.commit.checkpoint import Checkpoint
from fsdp_ckpt.commit.locate import locate_checkpoint
from fsdp_ckpt.errors import CorruptCheckpointError, MismatchError, NotFoundError
from fsdp_ckpt.manifest.strict_json import parse_json
from fsdp_ckpt.plan.dtypes import itemsize
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.storage.store import Store

__all__ = [
    "Commands",
    "add_checkpoint",
    "add_json",
    "add_patterns",
    "add_root",
    "add_threads",
    "any_dtype",
    "no_checkpoint",
    "open_named",
    "parse_dtype",
    "parse_rename",
    "parse_size",
    "positive",
    "read_key_map",
    "warn_of_skipped",
]

if TYPE_CHECKING:
    Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTP", 1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}

_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), "BF16"),
    **dict.fromkeys(("fp16", "f16", "float16", "half"), "F16"),
    **dict.fromkeys(("fp32", "f32", "float32", "float"), "F32"),
    **dict.fromkeys(("fp64", "f64", "float64", "double"), "F64"),
}


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add ``CHECKPOINT`` and ``--step``."""
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a run's root (its newest whole checkpoint is taken) or a step's folder; a path, or a URL "
        "such as s3://bucket/run",
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="take this step's checkpoint under the root CHECKPOINT",
    )


def add_root(parser: argparse.ArgumentParser) -> None:
    """Add ``ROOT``, a run's."""
    parser.add_argument("root", metavar="ROOT", help="a path, or a URL such as s3://bucket/run")


def add_patterns(parser: argparse.ArgumentParser) -> None:
    """Add ``--include`` and ``--exclude``."""
    for name, what in (("--include", "keep only"), ("--exclude", "leave out")):
        parser.add_argument(
            name,
            action="append",
            default=[],
            metavar="PATTERN",
            help=f"{what} tensors of names such as 'model.layers.*'; repeatable",
        )


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Add ``--threads``."""
    parser.add_argument("--threads", type=positive, metavar="N", help="reads or writes in flight")


def no_checkpoint(root: Store) -> NotFoundError:
    """Return the error for a root that holds no checkpoint, and nothing that was to become one."""
    return NotFoundError(
        f"{root.url}: no checkpoint here; name a run's root, which holds step-... folders"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document instead of text"
    )


def open_named(arguments: argparse.Namespace) -> Checkpoint:
    """Open what ``CHECKPOINT`` and ``--step`` name; warn of what was passed over."""
    checkpoint, skipped = locate_checkpoint(open_store(arguments.checkpoint), arguments.step)
    warn_of_skipped(skipped)
    return checkpoint


def warn_of_skipped(skipped: Sequence[SkippedCheckpoint]) -> None:
    """Say on stderr which newer checkpoints were passed over."""
    for passed in skipped:
        warn(f"passed over step {passed.step}: {passed.reason}")


def parse_size(text: str) -> int:
    """Turn ``5GB``, ``500 MB``, ``1GiB`` or ``4096`` into bytes; units without ``i`` are powers of 1000.

    Raises:
        argparse.ArgumentTypeError: Not a size of one byte or more.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip(), re.ASCII)
    unit = None if match is None else _UNITS.get(match[2].upper())
    num_bytes = 0 if match is None or unit is None else int(float(match[1]) * unit)
    if num_bytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 5GB, 500MB or 1GiB")
    return num_bytes


def positive(text: str) -> int:
    """Turn a number of 1 or more into an ``int``.

    Raises:
        argparse.ArgumentTypeError: It is not one.
    """
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def parse_dtype(text: str) -> str:
    """Turn ``bf16``, ``float32`` and the like into a dtype's name in the format.

    Raises:
        argparse.ArgumentTypeError: Not one of them.
    """
    dtype = _DTYPES.get(text.lower())
    if dtype is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype; write bf16, fp16, fp32 or fp64")
    return dtype


def any_dtype(text: str) -> str:
    """Turn a dtype's name, ours (``I64``) or as of :func:`parse_dtype`, into its name in the format.

    Raises:
        argparse.ArgumentTypeError: Not one of them.
    """
    name = _DTYPES.get(text.lower(), text.upper())
    try:
        itemsize(name)
    except CorruptCheckpointError as e:
        raise argparse.ArgumentTypeError(f"{e}; write bf16, fp32, i64, bool or the like") from e
    return name


def parse_rename(text: str) -> tuple[str, str]:
    """Turn ``OLD=NEW`` into its two sides; the first ``=`` parts them.

    Raises:
        argparse.ArgumentTypeError: There is none, or ``OLD`` is not a regular expression.
    """
    old, equals, new = text.partition("=")
    try:
        re.sub(old, new, "")
    except (re.error, IndexError) as e:
        raise argparse.ArgumentTypeError(f"{text!r}: {e}") from e
    if not old or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not OLD=NEW")
    return old, new


def read_key_map(url: str) -> dict[str, str]:
    """Read a JSON object of names and what they become.

    Raises:
        NotFoundError: No such file.
        MismatchError: It holds something else.
    """
    folder, slash, name = url.rpartition("/")
    try:
        found = parse_json(open_store(f"{folder}{slash}" or os.curdir).read(name))
    except CorruptCheckpointError as e:
        raise MismatchError(f"{url}: {e}; a JSON object expected", key=url) from e
    if not isinstance(found, dict) or not all(isinstance(new, str) for new in found.values()):
        raise MismatchError(f"{url}: not a JSON object of names and what they become", key=url)
    return found
