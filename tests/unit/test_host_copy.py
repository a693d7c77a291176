"""Copies in host memory: the same bytes whichever way they go, and digests of exactly those."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fsdp_ckpt.plan.image import BLOCK_BYTES
from fsdp_ckpt.snapshot import host_copy
from fsdp_ckpt.snapshot.host_copy import HostCopy, is_plain, stream_copy

needs_extension = pytest.mark.skipif(
    stream_copy is None and shutil.which("cc") is None, reason="there is no C compiler here"
)

# Around what the copy does at a time, a block, and two of them.
SIZES = st.one_of(
    st.integers(0, 200),
    st.integers(BLOCK_BYTES - 70, BLOCK_BYTES + 70),
    st.integers(65536 - 3, 65536 + 3),
    st.integers(2 * BLOCK_BYTES - 3, 2 * BLOCK_BYTES + 3),
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As torchrun has it; where torch has more of them, they share the copy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def copy_range() -> Callable[..., None]:
    assert stream_copy is not None, "there is a compiler, but the extension was not built"
    return stream_copy


def random_bytes(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)


@needs_extension
@given(st.integers(0, 130), st.integers(0, 130), st.integers(0, 300) | st.integers(65400, 65700))
def test_a_streaming_copy_copies_just_what_it_is_asked_to(to: int, of: int, size: int) -> None:
    """Whatever the alignment of either side; what it shows is all that it copied, in order."""
    source, target = random_bytes(of + size + 64), torch.zeros(to + size + 64, dtype=torch.uint8)
    expected = target.clone()
    expected[to : to + size] = source[of : of + size]
    shown: list[bytes] = []
    copy_range()(
        target.data_ptr() + to, source.data_ptr() + of, size, lambda part: shown.append(bytes(part))
    )
    assert torch.equal(target, expected)
    assert b"".join(shown) == bytes(source[of : of + size].numpy())
    target.zero_()
    copy_range()(target.data_ptr() + to, source.data_ptr() + of, size)
    assert torch.equal(target, expected)


@needs_extension
def test_a_streaming_copy_passes_errors_on() -> None:
    """Of what looks at the bytes, and of what it is given."""
    memory = ctypes.create_string_buffer(64)
    at = ctypes.addressof(memory)

    def fail(part: memoryview) -> None:
        raise LookupError(f"{len(part)} bytes, read-only: {part.readonly}")

    with pytest.raises(LookupError, match="32 bytes, read-only: True"):
        copy_range()(at + 32, at, 32, fail)
    with pytest.raises(ValueError, match="num_bytes is negative"):
        copy_range()(at + 32, at, -1)
    with pytest.raises(TypeError):
        copy_range()(at + 32, b"address", 32)


@needs_extension
@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=6))
def test_digests_are_of_the_blocks_that_came_this_way_as_a_whole(
    entries: list[tuple[int, bool]],
) -> None:
    """Those that another way had a part in have none; every digest is that of the image's bytes."""
    data_bytes = sum(size for size, _ in entries)
    image = torch.zeros(data_bytes, dtype=torch.uint8)
    copy, start = HostCopy(data_bytes, digesting=True), 0
    other_way: set[int] = set()
    for size, is_here in entries:
        source, target = random_bytes(size), image[start : start + size]
        if is_here:
            copy.copy(start, target.data_ptr(), source.data_ptr(), size)
        elif size:  # as an accelerator's tensor
            target.copy_(source)
            other_way |= set(range(start // BLOCK_BYTES, -(-(start + size) // BLOCK_BYTES)))
        start += size
    blocks = image.split(BLOCK_BYTES) if data_bytes else ()
    assert copy.digests == {
        number: xxhash.xxh3_64_hexdigest(block.numpy())
        for number, block in enumerate(blocks)
        if number not in other_way
    }


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("digesting", [True, False])
def test_bytes_are_the_same_without_the_extension(
    is_built: bool, digesting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nothing is digested on the way."""
    if not is_built:
        monkeypatch.setattr(host_copy, "stream_copy", None)
    source = random_bytes(3 * BLOCK_BYTES + 5)
    target = torch.empty_like(source)
    copy = HostCopy(len(source), digesting=digesting)
    copy.copy(0, target.data_ptr(), source.data_ptr(), len(source))
    assert torch.equal(target, source)
    assert len(copy.digests) == (4 if digesting and host_copy.stream_copy else 0)


def test_only_what_bytes_can_stand_for_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece, of the same dtype, nothing left to be done; and no thread of torch that could help."""
    plain, flat = torch.randn(64, 32), torch.empty(64, 32)
    assert is_plain(flat, plain)
    assert not is_plain(flat.t(), plain.t())
    assert not is_plain(flat.double(), plain)
    assert not is_plain(flat, plain[:1])
    complex_ones = torch.randn(5, dtype=torch.complex64)
    assert is_plain(complex_ones, complex_ones)
    assert not is_plain(complex_ones, complex_ones.conj())
    assert not is_plain(complex_ones.real, torch._neg_view(torch.randn(5)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not is_plain(flat, plain)
