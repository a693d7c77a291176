"""What TrainState(engine=...) says where there is no engine."""

from __future__ import annotations

import sys

import pytest
from torch import nn

from fsdp_ckpt import TrainState
from fsdp_ckpt.errors import MismatchError, UnencodableStateError


def test_without_deepspeed_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, with the command; a plain model needs no DeepSpeed."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as if it were not installed
    with pytest.raises(UnencodableStateError, match=r"pip install 'fsdp-ckpt\[deepspeed\]'"):
        TrainState(engine=object())
    TrainState(model=nn.Linear(2, 2))


def test_an_engine_comes_without_model_and_optimizer() -> None:
    """It has both."""
    with pytest.raises(MismatchError, match="give only the engine"):
        TrainState(engine=object(), model=nn.Linear(2, 2))
