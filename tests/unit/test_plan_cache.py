"""A structure that was planned once is not planned again, and any change of it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_ckpt import RankLocal, ShardSavePlanner
from fsdp_ckpt.dcp.agreement import agree


def build() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(3)},
        "steps": [torch.tensor(1.0), {"lr": 0.1}],
        "rng": RankLocal({"state": torch.arange(3), "python": (1, 2)}),
        "note": {"text": "x", "empty": {}},
    }


def plan(planner: ShardSavePlanner, state: dict[str, Any]) -> tuple[str, Any]:
    planner.set_up(state, rank=0, world_size=2)
    return planner.structure, planner.content()


def test_the_same_structure_is_planned_once() -> None:
    """New tensors and values in the same places: one agreement, one image layout, today's content."""
    planner = ShardSavePlanner()
    first = plan(planner, build())
    agreement = agree([planner.summary()] * 2)
    planner.accept(agreement, 0, 2)
    layout = planner.contents().layout
    planner.forget()
    later = build()
    later["model"]["w"] += 1
    later["steps"][1]["lr"] = 0.2
    later["note"]["text"] = ["longer", "than", "before"]
    second = plan(planner, later)
    assert second[0] == first[0]
    assert second[1] != first[1]
    planner.accept(agreement, 0, 2)
    contents = planner.contents()
    assert contents.layout is layout
    held = {entry.name: contents.resolve(entry) for entry in layout.entries}
    assert "model.w" not in held or held["model.w"].tolist() == later["model"]["w"].tolist()
    assert contents.global_values["steps", 1, "lr"] == 0.2


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "key added": lambda s: s["model"].update(more=torch.ones(1)),
    "key gone": lambda s: s["model"].pop("b"),
    "key renamed": lambda s: s["model"].update(c=s["model"].pop("b")),
    "shape": lambda s: s["model"].update(b=torch.zeros(4)),
    "dtype": lambda s: s["model"].update(b=torch.zeros(3, dtype=torch.float64)),
    "value for tensor": lambda s: s["model"].update(b=0.0),
    "tensor for value": lambda s: s["note"].update(text=torch.ones(1)),
    "tensor in a list": lambda s: s["note"].update(text=[torch.ones(1)]),
    "list longer": lambda s: s["steps"].append(torch.tensor(2.0)),
    "list for tuple": lambda s: s.update(steps=tuple(s["steps"])),
    "empty filled": lambda s: s["note"]["empty"].update(a=1),
    "mark gone": lambda s: s.update(rng=s["rng"].value),
    "mark added": lambda s: s.update(note=RankLocal(s["note"])),
    "own shape is free, own key is not": lambda s: s["rng"].value.update(more=1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_structure_is_planned_anew(change: str) -> None:
    """After any change of keys, kinds, shapes or dtypes a planner says what a new one would say."""
    planner = ShardSavePlanner()
    before = plan(planner, build())
    state = build()
    CHANGES[change](state)
    found = plan(planner, state)
    assert found == plan(ShardSavePlanner(), state)
    assert found[0] != before[0]
    assert planner.summary() == fresh_summary(state)


def fresh_summary(state: dict[str, Any]) -> Any:
    planner = ShardSavePlanner()
    planner.set_up(state, rank=0, world_size=2)
    return planner.summary()
