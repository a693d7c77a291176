"""Bytes: the store protocol, local files, fsspec stores. Knows nothing of torch, steps or manifests."""

from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.storage.store import ObjectWriter, Store

__all__ = ["ObjectWriter", "Store", "open_store"]
