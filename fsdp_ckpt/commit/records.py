"""Small JSON objects beside checkpoints: decisions to go back, and marks on checkpoints.

Invariant: a record is written once, create-only and durable, and is read whole or refused. It ends with a
digest of itself, as the manifest does, and takes a bounded number of bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

from fsdp_ckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from fsdp_ckpt.manifest.fields import shown
from fsdp_ckpt.manifest.strict_json import brief, parse_json, refuse_depth
from fsdp_ckpt.storage.store import Store

__all__ = ["MAX_RECORD_BYTES", "read_record", "record_to_bytes"]

MAX_RECORD_BYTES = 64 * 1024
MAX_DEPTH = 8
RECORD_VERSION = 1
_DIGEST_KEY = b',"digest":"'


def record_to_bytes(kind: str, fields: Mapping[str, Any]) -> bytes:
    """Return a record's content: ASCII, one line, its kind and version first, its digest last.

    Raises:
        ValueError: It is larger than a record may be, or holds NaN or an infinity.
    """
    document = {"format": f"fsdp_ckpt.{kind}", "version": RECORD_VERSION, **fields}
    body = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()[:-1]
    content = body + _DIGEST_KEY + xxhash.xxh3_64_hexdigest(body).encode() + b'"}'
    if len(content) > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {len(content)} bytes, at most {MAX_RECORD_BYTES} expected")
    return content


def read_record(store: Store, key: str, kind: str) -> dict[str, Any]:
    """Read and check a record.

    Args:
        store: Where it lies.
        key: Its name.
        kind: What it must be.

    Returns:
        Its fields, with ``format``, ``version`` and ``digest``; their types are not checked.

    Raises:
        NotFoundError: It is not there.
        CorruptCheckpointError: Not a whole record of this kind.
        UnsupportedFormatError: Of a newer version.
        StorageError: It cannot be read now.
    """
    where = f"{store.url}/{key}"
    content = store.read(key, MAX_RECORD_BYTES)
    try:
        document = parse_json(content)
        refuse_depth([document], MAX_DEPTH)
    except CorruptCheckpointError as e:
        raise CorruptCheckpointError(f"{where}: {brief(e)}; a torn write?", key=key) from e
    if not isinstance(document, dict) or document.get("format") != f"fsdp_ckpt.{kind}":
        raise CorruptCheckpointError(f"{where}: not a {kind} record of fsdp_ckpt", key=key)
    version = document.get("version")
    if type(version) is not int or version < 1:
        raise CorruptCheckpointError(f"{where}: record version {shown(version)}", key=key)
    if version > RECORD_VERSION:
        raise UnsupportedFormatError(
            f"{where}: record version {shown(version)} is newer than {RECORD_VERSION}, the newest this "
            "fsdp_ckpt reads; upgrade it",
            key=key,
        )
    body, _, tail = content.rpartition(_DIGEST_KEY)
    if tail != xxhash.xxh3_64_hexdigest(body).encode() + b'"}':
        raise CorruptCheckpointError(f"{where}: the digest does not match; damaged", key=key)
    return document
