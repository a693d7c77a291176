"""``ls`` over a bucket: what is there, in few requests however much it is."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from fsdp_ckpt.commit.catalog import (
    CheckpointInfo,
    SkippedCheckpoint,
    find_checkpoints,
    step_folder,
)
from fsdp_ckpt.commit.marks import add_mark, mark_key, pin
from fsdp_ckpt.commit.survey import survey_root
from fsdp_ckpt.storage.local import LocalStore
from fsdp_ckpt.storage.open import open_store
from fsdp_ckpt.storage.s3 import S3Store
from fsdp_ckpt.testing import FaultProxy
from tests.roots import attempt_at, put_checkpoint
from tests.s3.listing_server import serve_bucket
from tests.s3.servers import S3Place

pytestmark = pytest.mark.s3

NUM_CHECKPOINTS = 1000


def test_a_survey_sees_what_the_catalog_sees(s3: S3Place) -> None:
    """On real servers: whole, torn, damaged and pinned, by two listings and a read of each manifest."""
    root = open_store(s3.url, **s3.options)
    for step in range(1, 7):
        put_checkpoint(root, step, publish=step != 4)
    damaged = put_checkpoint(root, 7)
    root.child(step_folder(7)).delete(damaged.files[1].name)
    root.create("step-000000002.txt", b"of someone else")
    root.child("step-000000003b").create("x", b"of someone else")
    pin(root, 2)
    add_mark(root, 3, attempt_at(3 / 3600), "good")
    with FaultProxy(s3.server.endpoint) as proxy:
        seen = open_store(s3.url, **s3.server.storage_options(proxy.endpoint))
        survey = survey_root(seen)
        # And the damaged one's files once more: another checkpoint might have come since.
        assert len(proxy.requests) == 2 + 6 + 1
    found = list(find_checkpoints(root))
    assert [c.info for c in survey.checkpoints] == [
        f for f in found if isinstance(f, CheckpointInfo)
    ]
    assert list(survey.skipped) == [f for f in found if isinstance(f, SkippedCheckpoint)]
    marks = {c.info.step: c.marks for c in survey.checkpoints}
    assert marks == {
        6: frozenset(),
        5: frozenset(),
        3: frozenset({"good"}),
        2: frozenset({"pinned"}),
        1: frozenset(),
    }
    assert {c.layout for c in survey.checkpoints} == {"S0 over 2"}


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], dict[str, int]]:
    """A run of 1,000 checkpoints: manifests and marks to read, and shard files of two ranks to list."""
    root = tmp_path_factory.mktemp("one")
    manifest = put_checkpoint(LocalStore(str(root)), 1)
    read: dict[str, bytes] = {}
    listed: dict[str, int] = {}
    for step in range(1, NUM_CHECKPOINTS + 1):
        attempt, folder = attempt_at(step / 3600), f"run/{step_folder(step)}"
        files = tuple(
            dataclasses.replace(file, name=file.name.replace(manifest.attempt, attempt))
            for file in manifest.files
        )
        mine = dataclasses.replace(manifest, step=step, attempt=attempt, files=files)
        read[f"{folder}/manifest.json"] = mine.to_bytes()
        listed[f"{folder}/{mark_key('good', attempt)}"] = 100
        listed |= {f"{folder}/{file.name}": file.num_bytes for file in files}
    listed |= {f"run/events/{i:05d}": 1 for i in range(5000)}  # beside the steps, and never listed
    return read, listed


@pytest.mark.parametrize("limit", [None, 1, 20])
def test_a_thousand_checkpoints_take_few_requests(
    objects: tuple[dict[str, bytes], dict[str, int]], limit: int | None
) -> None:
    """At most two listings per 1,000 objects of the run, and one read per checkpoint looked at."""
    read, listed = objects
    with serve_bucket(read, listed) as bucket:
        store = open_store("s3://bucket/run", **bucket.options)
        assert isinstance(store, S3Store)
        survey = survey_root(store, limit)
        num_looked_at = limit or NUM_CHECKPOINTS
        steps = range(NUM_CHECKPOINTS, NUM_CHECKPOINTS - num_looked_at, -1)
        assert [c.info.step for c in survey.checkpoints] == list(steps)
        assert survey.num_older == NUM_CHECKPOINTS - num_looked_at
        assert survey.skipped == ()
        assert {c.marks for c in survey.checkpoints} == {frozenset({"good"})}
        assert sorted(bucket.reads) == sorted(
            f"run/{step_folder(step)}/manifest.json" for step in steps
        )
        num_objects = num_looked_at * 4
        # The level of the steps' folders, and what is in those looked at.
        pages = math.ceil((NUM_CHECKPOINTS + 1) / 1000) + math.ceil(num_objects / 1000)
        assert len(bucket.listings) == pages
        assert len(bucket.listings) <= 2 * math.ceil(NUM_CHECKPOINTS * 4 / 1000)


def test_a_local_root_is_surveyed_as_well(tmp_path: Path) -> None:
    """A store that lists a folder at a time is asked folder by folder."""
    root = LocalStore(str(tmp_path))
    for step in (1, 2, 3):
        put_checkpoint(root, step, publish=step != 3)
    pin(root, 1)
    survey = survey_root(root, 2)
    assert [c.info.step for c in survey.checkpoints] == [2]
    assert [s.step for s in survey.skipped] == [3]
    assert survey.num_older == 1
    assert survey_root(root).checkpoints[1].marks == {"pinned"}
