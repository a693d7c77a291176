"""What tests of training jobs need: real ranks, started and ended in one place. Public; may import torch."""

from __future__ import annotations

from fsdp_ckpt.testing.ranks import RankResult, RanksFailedError, RanksResult, run_ranks

__all__ = ["RankResult", "RanksFailedError", "RanksResult", "run_ranks"]
