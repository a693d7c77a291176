"""What holds for every test: a machine may stall for seconds at any place, and no test fails of that.

hypothesis draws the same examples in every run and measures no time; `make fuzz` looks for new ones.

At most four ranks run at once. Two workers of xdist share the files of tests: those that start more than two
ranks are all one worker's and come first, beside those that start none; then those of two ranks, beside each
other.

    worker 0    multiprocess, e2e: up to 4 ranks ---> whatever is left, the next file
    worker 1    fault, s3, unit ...: no ranks ------> whatever is left, the next file

A lock keeps the promise where a worker is ahead of that order.
"""

from __future__ import annotations

import fcntl
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from fsdp_ckpt.testing.ranks import PRELOADED

settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("steady")

MANY, NONE, FEW = range(3)  # ranks that a file's tests start; in this order
WITH_RANKS = ("multiprocess", "e2e")
# Ranks are forked from a process that has loaded these too, where they are installed.
PRELOADED.extend(
    [
        "transformers.trainer",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.llama.modeling_llama",
        "deepspeed",
    ]
)


@functools.cache
def ranks_of(file: Path) -> int:
    """Return how many ranks a file's tests start: many, where nothing says that they are few or none."""
    if file.relative_to(Path(__file__).parent).parts[0] not in WITH_RANKS:
        return NONE
    # From its text: what shares out the files among workers knows no marks.
    return FEW if "pytest.mark.few_ranks" in file.read_text() else MANY


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests; of a kind, slow files come first, so that at the end no worker waits for long."""
    items.sort(key=lambda item: (ranks_of(item.path), item.get_closest_marker("slow") is None))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a worker the tests of a file together, and all that start many ranks."""
    from xdist.scheduler import LoadFileScheduling

    class ByRanks(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return "many ranks" if ranks_of(config.rootpath / file) == MANY else file

    return ByRanks(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let a test of many ranks run beside none that starts ranks; to wait for that takes none of its time."""
    kind = ranks_of(item.path)
    if kind == NONE:
        return (yield)
    with open(__file__) as file:
        fcntl.flock(file, fcntl.LOCK_EX if kind == MANY else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            # A process that was forked meanwhile has the file open too.
            fcntl.flock(file, fcntl.LOCK_UN)
