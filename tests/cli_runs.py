"""Runs of every command for tests: on a root, or a Hugging Face folder, in each state that it may be in."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np
from safetensors.numpy import save_file

from fsdp_ckpt.storage.open import open_store
from tests.roots import put_checkpoint

__all__ = ["COMMANDS", "STATES", "CliRun", "State", "deny_all", "make_sources", "put_in_state"]

State: TypeAlias = Literal[
    "good", "torn", "flipped", "truncated", "missing", "empty", "nowhere", "denied"
]
STATES: tuple[State, ...] = get_args(State)
STEP = 5
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class CliRun:
    """A command line, and what it ends with.

    Args:
        line: With ``{root}``, ``{hf}`` and ``{out}`` for where the checkpoint, the model and the result are.
        well: States in which all is well: exit code 0.
        error_code: In all others.
    """

    line: str
    well: tuple[State, ...]
    error_code: int = 1

    def __str__(self) -> str:
        return self.line

    @property
    def command(self) -> str:
        """The first word."""
        return self.line.split()[0]

    def argv(self, **places: str) -> list[str]:
        """Return the arguments, with the places filled in."""
        return [word.format(**places) for word in self.line.split()]


SIZES_ARE_RIGHT: tuple[State, ...] = ("good", "flipped")
MANIFEST_IS_THERE: tuple[State, ...] = ("good", "flipped", "truncated", "missing")

# One line or more for each command; a new command goes in here.
COMMANDS = (
    CliRun("ls {root}", SIZES_ARE_RIGHT),
    CliRun("ls {root} --limit 1", SIZES_ARE_RIGHT),
    CliRun("show {root}", SIZES_ARE_RIGHT),
    CliRun("show {root} --step 5 --include w", MANIFEST_IS_THERE),
    CliRun("show {root} --rank 1", SIZES_ARE_RIGHT),
    CliRun("verify {root}", ("good",)),
    CliRun("verify {root} --step 5", ("good",)),
    CliRun("verify {root} --fast", SIZES_ARE_RIGHT),
    CliRun("consolidate {root} {out} --what all", ("good",)),
    CliRun("consolidate {root} {out} --what all --dry-run", SIZES_ARE_RIGHT),
    CliRun("import {hf} {out}", ("good", "flipped")),  # the files have no digests
    # Both need what no state has; their own tests show them well.
    CliRun("import-deepspeed {hf} {out}", ()),
    CliRun("report {root}", ()),
    CliRun("reshard {root} {out} --world-size 1", ("good",)),
    CliRun("prune {root} --last 1", MANIFEST_IS_THERE),  # what is damaged it leaves alone
    CliRun("pin {root} 5", MANIFEST_IS_THERE),
    CliRun("pin {root} 5 --unpin", MANIFEST_IS_THERE),
    CliRun("diff {root} {root}", ("good",), error_code=2),
    CliRun("plan {root} --world-size 3", SIZES_ARE_RIGHT),
    CliRun("repair {root}", ("torn", *SIZES_ARE_RIGHT)),
    CliRun("interval --cost 6s --mtbf 3h --ranks 8", STATES),
    CliRun("schema ls", STATES),
)


def make_sources(folder: Path) -> None:
    """Write a run's root, one with a torn attempt, and a Hugging Face model of two files."""
    put_checkpoint(open_store(str(folder / "root")), STEP)
    put_checkpoint(open_store(str(folder / "torn")), STEP, publish=False)
    hf = folder / "hf"
    hf.mkdir()
    names = {f"w{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    for tensor, name in names.items():
        save_file({tensor: np.arange(4, dtype=np.float32)}, hf / name)
    (hf / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def put_in_state(sources: Path, folder: Path, state: State) -> dict[str, str]:
    """Copy what :func:`make_sources` wrote, in a state; return ``root``, ``hf`` and ``out``."""
    places = {name: folder / name for name in ("root", "hf", "out")}
    if state == "empty":
        for name in ("root", "hf"):
            places[name].mkdir(parents=True)
            (places[name] / "notes.txt").write_text("nothing of ours")
    elif state not in ("nowhere", "denied"):
        shutil.copytree(sources / ("torn" if state == "torn" else "root"), places["root"])
        shutil.copytree(sources / "hf", places["hf"])
        _damage(next(places["root"].glob("*/*/rank-00001-*")), state)
        _damage(next(places["hf"].glob("*-00002-*")), "missing" if state == "torn" else state)
    texts = {name: str(path) for name, path in places.items()}
    if state == "denied":
        texts |= {name: f"s3://denied/{name}" for name in ("root", "hf")}
    return texts


def _damage(path: Path, state: State) -> None:
    data = bytearray(path.read_bytes())
    if state == "flipped":
        data[-1] ^= 1
        path.write_bytes(data)
    elif state == "truncated":
        path.write_bytes(data[:-1])
    elif state == "missing":
        path.unlink()


class _Denial(BaseHTTPRequestHandler):
    """Answers as S3 does for keys that are not allowed."""

    protocol_version = "HTTP/1.1"
    BODY = (
        b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>AccessDenied</Code>'
        b"<Message>Access Denied</Message></Error>"
    )

    def _deny(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(self.BODY)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.BODY)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _deny

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def deny_all() -> Iterator[dict[str, str]]:
    """Serve S3 that answers 403 to everything; yields the environment that leads there."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Denial) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
        finally:
            server.shutdown()
            thread.join()
