"""Telemetry on real S3: written as whole objects, read back as a report."""

from __future__ import annotations

import pytest

from fsdp_ckpt.report.digest import digest
from fsdp_ckpt.report.reading import read_telemetry
from fsdp_ckpt.storage.open import open_store
from tests.s3.servers import S3Place
from tests.told_runs import Told

pytestmark = pytest.mark.s3


def test_lines_grow_by_objects_and_come_back(s3: S3Place) -> None:
    """Each flush leaves one object per rank, whatever it wrote before."""
    store = open_store(s3.url, **s3.options)
    told = Told(store, 0, 3, 0.0)
    for step in (1, 2, 3):
        told.save(step, 100.0 * step)
        told.end(100.0 * step + 50.0, step=step)
        assert len([key for key in s3.sizes() if key.endswith(".jsonl")]) == 3
    run = digest(read_telemetry(store))
    assert [save.step for save in run.committed] == [1, 2, 3]
    assert run.notes == ()
