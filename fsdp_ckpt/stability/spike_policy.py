"""What counts as a spike, and what is to be done then: options, and decisions as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

__all__ = ["Action", "SpikeAction", "SpikeDecision", "SpikePolicy"]

SpikeAction: TypeAlias = Literal["skip_update", "lower_lr", "roll_back", "stop"]
Action: TypeAlias = Literal["none", SpikeAction]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikePolicy:
    """What counts as a spike, and what is to be done then.

    A step is *suspicious* where the mean loss over ranks, the highest loss of a rank, or the highest gradient
    norm is far above what has been usual lately. So many in a row are a spike; fewer are an outlier. A loss
    or norm that is NaN or infinite on any rank is a spike at once.

    Args:
        window: Steps that say what is usual; suspicious ones do not count.
        warmup: Steps before any is judged, but for NaN and infinities.
        loss_sigmas: By how many standard deviations a loss must exceed the median of the window.
        grad_sigmas: Likewise a gradient norm, by its logarithm: norms vary by factors.
        min_loss_sigma: The least standard deviation of losses, as a part of their median: what a smooth curve
            is taken to vary by.
        min_grad_sigma: Likewise of the logarithm of gradient norms.
        patience: Suspicious steps in a row that make a spike.
        on_outlier: What to do about a suspicious step that is not a spike yet.
        on_spike: What to do about a spike.
        lr_factor: What ``lower_lr`` and ``roll_back`` multiply the learning rate with.
        lr_steps: For how many steps.
        skip_before: Steps before the first suspicious one whose data a rollback skips too.
        skip_after: Likewise after the last.
        max_rollbacks: Rollbacks at one place, after which the run is stopped.
        healthy_steps: Healthy steps in a row after which a checkpoint is good.
        look_every: Steps from one look to the next; every step is judged, but found out about then. Each look
            is an exchange between all ranks.
    """

    window: int = 128
    warmup: int = 32
    loss_sigmas: float = 6.0
    grad_sigmas: float = 8.0
    min_loss_sigma: float = 0.02
    min_grad_sigma: float = 0.1
    patience: int = 3
    on_outlier: Literal["none", "skip_update"] = "none"
    on_spike: SpikeAction = "roll_back"
    lr_factor: float = 1.0
    lr_steps: int = 0
    skip_before: int = 0
    skip_after: int = 0
    max_rollbacks: int = 3
    healthy_steps: int = 10
    look_every: int = 1

    def __post_init__(self) -> None:
        for name in ("window", "warmup", "patience", "healthy_steps", "look_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("lr_steps", "skip_before", "skip_after", "max_rollbacks"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        for name in ("loss_sigmas", "grad_sigmas", "min_loss_sigma", "min_grad_sigma"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.warmup > self.window:
            raise ValueError(f"warmup {self.warmup} is longer than the window of {self.window}")
        if not 0 < self.lr_factor <= 1:
            raise ValueError(f"lr_factor must be in (0, 1], not {self.lr_factor}")
        if self.on_outlier not in ("none", "skip_update") or self.on_spike not in get_args(
            SpikeAction
        ):
            raise ValueError(f"no such actions: {self.on_outlier!r}, {self.on_spike!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeDecision:
    """What to do after a step; the same on all ranks.

    Args:
        action: ``none``; ``skip_update``: leave the optimizer's step out, where it was not made yet;
            ``lower_lr``: for ``lr_steps`` steps; ``roll_back``: to the newest good checkpoint; ``stop``.
        step: After which step.
        is_healthy: Whether nothing was suspicious.
        reason: One line; empty where healthy.
        ranks: On which ranks, as far as it shows on some only.
        skip_steps: (first, stop): the steps whose data a rollback skips.
        lr_factor: What the learning rate is to be multiplied with.
        lr_steps: For how many steps.
    """

    action: Action
    step: int
    is_healthy: bool = False
    reason: str = ""
    ranks: tuple[int, ...] = ()
    skip_steps: tuple[int, int] | None = None
    lr_factor: float = 1.0
    lr_steps: int = 0
