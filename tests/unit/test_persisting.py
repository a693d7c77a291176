"""What is under way, and what follows it."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import Future

from fsdp_ckpt.commit.catalog import CheckpointInfo
from fsdp_ckpt.ranks.group import RankGroup
from fsdp_ckpt.saving.persisting import Persister

INFO = CheckpointInfo(
    step=1, attempt="a", generation=0, world_size=1, num_bytes=1, created="", url="u"
)


def test_finishing_waits_for_what_follows_a_commit() -> None:
    """A commit's own followers have run too, which those that wait for the commit may be ahead of."""
    persister = Persister(RankGroup(), timeout_s=250.0)
    begin, go_on, followed = threading.Event(), threading.Event(), threading.Event()
    seen: list[bool] = []
    write: Future[str] = Future()
    write.set_result("digest")

    def follow(future: Future[CheckpointInfo]) -> None:
        assert go_on.wait(250)
        followed.set()

    def finish() -> None:
        persister.finish()
        seen.append(followed.is_set())

    persister._commits.submit(begin.wait, 250)
    committed = persister.submit(1, write, str, lambda receipts: dataclasses.asdict(INFO))
    committed.add_done_callback(follow)
    begin.set()
    assert committed.result(250) == INFO  # and is not yet followed
    finishing = threading.Thread(target=finish)
    finishing.start()
    finishing.join(0.05)  # a finish that is too early has ended by then, unless the machine is slow
    go_on.set()
    finishing.join(250)
    assert seen == [True]
    persister.close()
    persister.finish()
