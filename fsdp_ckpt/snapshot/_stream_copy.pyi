from collections.abc import Callable

def stream_copy(
    target: int,
    source: int,
    num_bytes: int,
    update: Callable[[memoryview], object] | None = None,
    /,
) -> None:
    """Copy between addresses, which must not overlap, past the processor's cache where it can.

    Args:
        target: Address.
        source: Address.
        num_bytes: To copy.
        update: Called with each part of the source, right after it was copied and while it is in the cache,
            with the interpreter lock held all the while. Without it the lock is given up.
    """
