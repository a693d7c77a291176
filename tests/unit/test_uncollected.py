"""Garbage collections are put off, and come back as they were."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from fsdp_ckpt.uncollected import uncollected


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leave the collector as it was."""
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


def test_nothing_is_collected_inside() -> None:
    """One inside another, and after an error too."""
    gc.enable()
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with suppress(ValueError), uncollected():
        raise ValueError
    assert gc.isenabled()


def test_what_the_program_has_turned_off_stays_off() -> None:
    """Programs that collect at moments of their own go on doing so."""
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()
