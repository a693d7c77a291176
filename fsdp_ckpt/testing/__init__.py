"""What tests of training jobs need: real ranks, and faults of stores and of HTTP servers. Public."""

from __future__ import annotations

from fsdp_ckpt.testing.fault_proxy import FaultProxy
from fsdp_ckpt.testing.fault_store import FaultStore
from fsdp_ckpt.testing.faults import Fault, FaultNotFiredError, FaultPlan, Operation
from fsdp_ckpt.testing.http_faults import HttpFault, HttpRequest
from fsdp_ckpt.testing.ranks import (
    RankResult,
    RanksFailedError,
    RanksResult,
    over_tcp,
    run_ranks,
)

__all__ = [
    "Fault",
    "FaultNotFiredError",
    "FaultPlan",
    "FaultProxy",
    "FaultStore",
    "HttpFault",
    "HttpRequest",
    "Operation",
    "RankResult",
    "RanksFailedError",
    "RanksResult",
    "over_tcp",
    "run_ranks",
]
