"""Feed hostile manifests, shard headers, values and checkpoints to the readers until one fails as none may.

    python -m scripts.fuzz --seconds 120 --seed 1                from the golden checkpoint and tests/corpus
    python -m scripts.fuzz --replay fuzz-header-5d41aa0c.bin     one input again, with the traceback

Whatever is read, a reader gives something that makes sense, or one line of an error of our tree: soon,
without more memory than the input is worth, and without a look at any key outside of the checkpoint. An
input that breaks this is written to a file; once the reader is mended, it belongs into the corpus.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import random
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.fuzz_targets import (
    GOLDEN,
    LITERALS,
    TWICE,
    golden_parts,
    read_header,
    run,
    seal_header,
    seal_manifest,
    write_header,
    write_json,
)

CORPUS = Path(__file__).resolve().parents[1] / "tests" / "corpus"
LIMIT_BYTES = (
    3 * 2**30
)  # of address space, so that a claimed size shows as an error and not as a full machine
# A checkpoint takes ten times as long as a part of one.
TURNS = ("manifest", "header", "value", "manifest", "header", "value", "checkpoint")
SEALED_SHARE = 0.9  # of the changed bytes: what else has a wrong digest is refused at once

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 8, 4096, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63),
    10**100, 0.0, -0.5, 1e308, "", "a", "..", "../x", "/etc/passwd", "s3://other/x.safetensors",
    "a/../b.safetensors", "a/b.safetensors", "\0", "\ud800", "\x1b[31m", "a\nb", "w" * 5000, "F32", "U8",
    "C128", "S0", "S0/2", "S999", "R", "own", "tuple", "0x" + "f" * 4000, "-", "AAAA", "<U999999999", "|O",
    "<M8[0s]",
    [], [[]], {}, {"$": "tuple"}, {"$": []}, {"$": "set", "v": [[]]}, {"$": "range", "v": [0, 1, 0]},
    {"$": "deque", "v": [], "maxlen": -1}, {"$": "ndarray", "dtype": "<f4", "shape": [2**62, 0], "v": ""},
    {"$": "enum", "type": "os:environ", "v": "x"}, [0] * 100, list(range(40)), [1] * 33, {"shape": [2**40]},
    {"chunks": []}, {"mesh": 0, "flat": [1, 2**62]}, *LITERALS,
)  # fmt: skip


def seeds() -> dict[str, list[bytes]]:
    """Return target → inputs to start from: the golden checkpoint's parts, and the corpus."""
    parts = golden_parts()
    values = [json.dumps(value).encode() for _, value in parts["manifest"]["values"]]
    found = {
        "manifest": [(GOLDEN / "manifest.json").read_bytes()],
        "header": [write_header(header) for header in parts["headers"].values()],
        "value": values,
        "checkpoint": [json.dumps(parts).encode()],
    }
    for target, path in corpus():
        found[target].append(path.read_bytes())
    return found


def corpus() -> list[tuple[str, Path]]:
    """Return (target, file) of every input of the corpus."""
    return [(path.parent.name, path) for path in sorted(CORPUS.glob("*/*")) if path.is_file()]


def mutate(target: str, content: bytes, rng: random.Random) -> bytes:
    """Return a changed input: parts of its JSON, its bytes, or both."""
    if rng.random() < 0.8:
        with suppress(RecursionError):  # the corpus has what is as deep as can be
            content = mutate_json(target, content, rng)
    if target != "checkpoint" and rng.random() < 0.4:
        content = mutate_bytes(content, rng)
        if rng.random() < SEALED_SHARE and target == "manifest":
            content = seal_manifest(content)
        elif rng.random() < SEALED_SHARE and target == "header":
            content = seal_header(content[8:].rstrip(b" "))
    return content


def mutate_json(target: str, content: bytes, rng: random.Random) -> bytes:
    """Change some parts of a document; what is none is returned as it is."""
    try:
        document = read_header(content) if target == "header" else json.loads(content)
    except (ValueError, KeyError, TypeError, RecursionError):
        return content
    holder = [document]
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        change(holder, rng)
    if target == "header":
        return write_header(holder[0])
    if target == "checkpoint":  # literals are put in where its parts are written
        return json.dumps(holder[0]).encode()
    text = write_json(holder[0])
    return seal_manifest(text) if target == "manifest" else text


def change(document: Any, rng: random.Random) -> None:
    """Make one change somewhere in a document, deep or not."""
    container, key = rng.choice(list(places(document)))
    value = container[key]
    match rng.randrange(8):
        case 0 | 1 | 2:
            container[key] = copy.deepcopy(rng.choice(VALUES))
        case 3 if type(value) in (int, float):
            container[key] = value + rng.choice((-1, 1, 7, 4096, 2**31, 2**62, -(2**40)))
        case 4 if isinstance(container, dict):
            container[TWICE + key] = copy.deepcopy(rng.choice((value, rng.choice(VALUES))))
        case 4:
            container.insert(rng.randrange(len(container) + 1), copy.deepcopy(value))
        case 5 if isinstance(container, dict) or len(container) > 1:
            del container[key]
        case 6:
            other, at = rng.choice(list(places(document)))
            container[key] = copy.deepcopy(other[at])
        case 7 if isinstance(value, list) and value:
            rng.shuffle(value)
        case _:
            container[key] = [value]


def places(document: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key or position) of every part."""
    if depth > 60:
        return
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, part in list(items):
        yield document, key
        if isinstance(part, dict | list):
            yield from places(part, depth + 1)


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flip, cut, double or overwrite bytes."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(changed) + 1)
        length = rng.choice((1, 1, 4, 16, 200))
        match rng.randrange(5):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at : at + length]
            case 2:
                changed[at:at] = changed[at : at + length]
            case 3:
                changed[at : at + 8] = rng.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1)).to_bytes(
                    8, "little"
                )
            case _:
                literal = rng.choice((*LITERALS.values(), "[", "{", '"', ",", "\\ud800", "\x00"))
                changed[at : at + length] = literal.encode()
    return bytes(changed)


def fuzz(seed: int, rounds: int | None = None, seconds: float | None = None) -> Counter[str]:
    """Run changed inputs, round-robin over the targets, until one of the limits is reached.

    Args:
        seed: The same seed gives the same inputs.
        rounds: Most inputs.
        seconds: Longest time.

    Returns:
        Target → how many inputs were run.

    Raises:
        FailureError: An input broke what must hold.
    """
    rng = random.Random(seed)
    pool = seeds()
    done: Counter[str] = Counter()
    end = None if seconds is None else time.monotonic() + seconds
    while (rounds is None or done.total() < rounds) and (end is None or time.monotonic() < end):
        target = TURNS[done.total() % len(TURNS)]
        content = mutate(target, rng.choice(pool[target]), rng)
        try:
            run(target, content)
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt):
                raise
            raise FailureError(target, content) from e
        done[target] += 1
    return done


class FailureError(Exception):
    """An input that broke what must hold; its cause says how."""

    def __init__(self, target: str, content: bytes) -> None:
        self.target, self.content = target, content
        super().__init__(f"{target}, {len(content)} bytes: {content[:300]!r}")


def main() -> int:
    """Fuzz or replay; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=Path, metavar="FILE", help="fuzz-TARGET-DIGEST.bin")
    parser.add_argument("--out", type=Path, default=Path(), help="where a failing input is written")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, resource.RLIM_INFINITY))
    if args.replay is not None:
        run(args.replay.name.split("-")[1], args.replay.read_bytes())
        print(f"{args.replay}: nothing to find")
        return 0
    try:
        done = fuzz(args.seed, seconds=args.seconds)
    except FailureError as e:
        name = f"fuzz-{e.target}-{hashlib.sha256(e.content).hexdigest()[:8]}.bin"
        (args.out / name).write_bytes(e.content)
        traceback.print_exception(e.__cause__)
        print(f"\nseed {args.seed}: {e}\n\n    python -m scripts.fuzz --replay {args.out / name}")
        return 1
    counts = ", ".join(f"{count:,} {target}s" for target, count in done.items())
    print(f"seed {args.seed}, {args.seconds:.0f} s: {counts}; nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
