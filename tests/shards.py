"""Reading ranges of a shard file, as a restore does."""

from __future__ import annotations

from typing import Any

from fsdp_ckpt.storage.shard_io import plan_reads, run_all


def read_ranges(*args: Any, num_threads: int = 2, **kwargs: Any) -> None:
    run_all(plan_reads(*args, **kwargs), num_threads)
