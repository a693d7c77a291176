"""Sizes and ages between people and the command."""

from __future__ import annotations

import argparse
import datetime

import pytest

from fsdp_ckpt.cli.arguments import parse_size
from fsdp_ckpt.cli.text import age_text, bytes_text


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 5 * 10**8),
        ("1GiB", 2**30),
        ("1.5 kb", 1500),
        ("4096", 4096),
        ("2TiB", 2**41),
        ("7B", 7),
        ("3G", 3 * 10**9),
    ],
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    """Units as people write them, of 1000 without ``i`` and of 1024 with it."""
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "5 XB", "1e3", "5GBB", "0.1B", "٣GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """Including nothing, negative and less than a byte."""
    with pytest.raises(argparse.ArgumentTypeError, match="5GB"):
        parse_size(text)


def test_values_are_short() -> None:
    """Three digits and a unit; the largest unit of time."""
    sizes = [bytes_text(n) for n in (0, 999, 1000, 999_499, 123_456_789, 10**15, 5 * 10**18)]
    assert sizes == ["0 B", "999 B", "1 kB", "999 kB", "123 MB", "1 PB", "5000 PB"]
    now = datetime.datetime.now(datetime.UTC)
    assert age_text((now - datetime.timedelta(hours=30)).isoformat()) == "1d"
    assert age_text((now - datetime.timedelta(minutes=61)).isoformat()) == "1h"
    assert age_text((now + datetime.timedelta(minutes=61)).isoformat()) == "0s"
    assert age_text("") == age_text("2026-01-01T00:00:00") == "?"
