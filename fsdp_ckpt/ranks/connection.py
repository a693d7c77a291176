"""The c10d store through which ranks talk: one connection for the training thread, one for the background.

A TCPStore's client holds its lock while it waits, so a wait in the background on the training thread's
connection would hold training up, and two ranks could wait for each other in that way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["connect"]

# The default store, and our own connection to it for each of the two kinds of groups: to make one can take
# seconds (torch 2.13: now and then a TCPStore's client waits before it connects again).
_connections: tuple[Store, dict[bool, Store]] | None = None


def connect(*, in_background: bool) -> tuple[Store, bool]:
    """Return a connection to the job's store for groups of one kind, and whether several threads wait on it.

    Called on every rank with an initialised process group.
    """
    global _connections
    # The public API gives no handle on the store that init_process_group made.
    default: Store = dist.distributed_c10d._get_default_store()
    inner: Any = default
    while isinstance(inner, dist.PrefixStore):  # type: ignore[attr-defined]  # torch lists no names
        inner = inner.underlying_store
    if not isinstance(inner, dist.TCPStore):  # type: ignore[attr-defined]  # likewise
        return default, False  # in files or in memory: no call keeps the others out while it waits
    clone = getattr(default, "clone", None)  # torch >= 2.8
    if clone is None:
        return default, True
    if _connections is None or _connections[0] is not default:
        _connections = default, {}
    made = _connections[1]
    if in_background not in made:
        made[in_background] = clone()
    return made[in_background], in_background
