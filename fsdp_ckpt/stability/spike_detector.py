"""From the losses and gradient norms of all ranks to one decision per step.

    losses, norms of all ranks ──> finite? ──> usual? ──> healthy: the windows take them in
                                      │           └─────> suspicious ──> as often in a row as patience says?
                                      └──────────────────────────────────────────> spike <──────┘

Invariant: the decision follows from the values alone, in their order, so that whoever sees the same comes to
the same; what was suspicious never becomes what is usual.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_ckpt.errors import MismatchError
from fsdp_ckpt.stability.robust_window import RobustWindow
from fsdp_ckpt.stability.spike_policy import Action, SpikeDecision, SpikePolicy

__all__ = ["SpikeDetector"]

SIGNALS = ("mean loss", "highest loss", "gradient norm")


class SpikeDetector:
    """Watches a run; one per run, fed by the coordinator, or by every rank alike.

    Its state belongs into the checkpoint: a run that goes back must know what was usual then.

    Args:
        policy: What counts as a spike.
    """

    def __init__(self, policy: SpikePolicy) -> None:
        self.policy = policy
        self._windows = {name: RobustWindow(policy.window) for name in SIGNALS}
        self._num_suspicious = 0
        self._first_suspicious = 0

    def observe(
        self,
        step: int,
        losses: Sequence[float],
        grad_norms: Sequence[float] = (),
        *,
        num_rollbacks: int = 0,
    ) -> SpikeDecision:
        """Decide about one step.

        Args:
            step: Its number.
            losses: One per rank, of the step's batch.
            grad_norms: One per rank, before clipping; or none.
            num_rollbacks: How often the run has gone back at this place already.

        Raises:
            MismatchError: No losses, or norms of another number of ranks.
        """
        if not losses or (grad_norms and len(grad_norms) != len(losses)):
            raise MismatchError(
                f"step {step}: {len(losses)} losses and {len(grad_norms)} gradient norms; give one of each "
                "per rank",
                step=step,
            )
        broken = _not_finite(losses, grad_norms)
        if broken:
            reason = f"a loss or gradient norm that is no number on rank {_listed(broken)}"
            return self._spike(step, reason, broken, num_rollbacks)
        values = _signals(losses, grad_norms)
        found = self._suspicion(values)
        if found is None:
            for name, value in values.items():
                self._windows[name].add(value)
            self._num_suspicious = 0
            return SpikeDecision(action="none", step=step, is_healthy=True)
        name, reason = found
        ranks = () if name == "mean loss" else (_culprit(name, losses, grad_norms),)
        self._note(step)
        if self._num_suspicious < self.policy.patience:
            return SpikeDecision(
                action=self.policy.on_outlier, step=step, reason=reason, ranks=ranks
            )
        return self._spike(step, reason, ranks, num_rollbacks, is_noted=True)

    def _note(self, step: int) -> None:
        if self._num_suspicious == 0:
            self._first_suspicious = step
        self._num_suspicious += 1

    def _suspicion(self, values: Mapping[str, float]) -> tuple[str, str] | None:
        """Return the signal that is furthest beyond what is usual, and how far, in words."""
        policy = self.policy
        worst: tuple[float, str, str] | None = None
        for name, value in values.items():
            window = self._windows[name]
            if len(window) < policy.warmup:
                continue
            is_norm = name == "gradient norm"
            limit = policy.grad_sigmas if is_norm else policy.loss_sigmas
            floor = policy.min_grad_sigma if is_norm else policy.min_loss_sigma * abs(window.center)
            sigmas = window.deviation(value, floor)
            if sigmas > limit and (worst is None or sigmas / limit > worst[0]):
                shown = [math.exp(v) if is_norm else v for v in (value, window.center)]
                reason = (
                    f"{name} {shown[0]:.4g}, {sigmas:.1f} standard deviations above the median "
                    f"{shown[1]:.4g} of {len(window)} steps"
                )
                worst = (sigmas / limit, name, reason)
        return None if worst is None else worst[1:]

    def _spike(
        self,
        step: int,
        reason: str,
        ranks: Sequence[int],
        num_rollbacks: int,
        *,
        is_noted: bool = False,
    ) -> SpikeDecision:
        policy = self.policy
        if not is_noted:
            self._note(step)
        first, self._num_suspicious = self._first_suspicious, 0
        action: Action = policy.on_spike
        if action == "roll_back" and num_rollbacks >= policy.max_rollbacks:
            action = "stop"
            reason = f"{reason}; the run has gone back {num_rollbacks} times at this place already"
        lowers = action in ("roll_back", "lower_lr")
        if action == "lower_lr":
            # What is usual from now on is another thing.
            self._windows = {name: RobustWindow(policy.window) for name in SIGNALS}
        return SpikeDecision(
            action=action,
            step=step,
            reason=f"step {step}: {reason}",
            ranks=tuple(ranks),
            skip_steps=(max(first - policy.skip_before, 0), step + 1 + policy.skip_after),
            lr_factor=policy.lr_factor if lowers else 1.0,
            lr_steps=policy.lr_steps if lowers else 0,
        )

    # --- the state ---

    def state_dict(self) -> dict[str, Any]:
        """Return what it has seen, as plain lists and numbers."""
        return {
            "windows": {name: window.to_json() for name, window in self._windows.items()},
            "num_suspicious": self._num_suspicious,
            "first_suspicious": self._first_suspicious,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of :meth:`state_dict`; of a longer window, its newest values.

        Raises:
            MismatchError: It is not one; nothing has changed.
        """
        try:
            values = {name: [float(v) for v in state["windows"][name]] for name in SIGNALS}
            counts = [int(state[name]) for name in ("num_suspicious", "first_suspicious")]
        except (KeyError, TypeError, ValueError) as e:
            raise MismatchError(
                f"the spike detector's state does not load ({type(e).__name__}: {e}); leave it out to start "
                "anew"
            ) from e
        if min(counts) < 0 or not all(math.isfinite(v) for vs in values.values() for v in vs):
            raise MismatchError(
                "the spike detector's state holds negative counts or values that are no numbers; leave it "
                "out to start anew"
            )
        self._windows = {name: RobustWindow(self.policy.window, vs) for name, vs in values.items()}
        self._num_suspicious, self._first_suspicious = counts


def _not_finite(losses: Sequence[float], grad_norms: Sequence[float]) -> tuple[int, ...]:
    broken = {
        r for values in (losses, grad_norms) for r, v in enumerate(values) if not math.isfinite(v)
    }
    return tuple(sorted(broken))


def _signals(losses: Sequence[float], grad_norms: Sequence[float]) -> dict[str, float]:
    """Return what is watched; of gradient norms the logarithm."""
    # fsum, so that the mean does not depend on the order of ranks; each divided, so that none is too large.
    mean = math.fsum(loss / len(losses) for loss in losses)
    values = {"mean loss": mean, "highest loss": max(losses)}
    if grad_norms:
        # A norm of 0 is a step without gradients, which is no spike.
        values["gradient norm"] = math.log(max(max(grad_norms), 1e-30))
    return values


def _culprit(name: str, losses: Sequence[float], grad_norms: Sequence[float]) -> int:
    values = grad_norms if name == "gradient norm" else losses
    return max(range(len(values)), key=values.__getitem__)


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
