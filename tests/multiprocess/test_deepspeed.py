"""DeepSpeed engines save and resume through us, on any number of ranks, and as any other layout.

4 ranks     train every kind of engine, save, resume it and its like, go on
1 process   resume the plain model from an engine's checkpoint, save
2 ranks     resume engines; FSDP2, FSDP1 and back; a managed run that saves beside its steps
3 ranks     resume engines

What is expected was gathered by DeepSpeed itself, before the save.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fsdp_ckpt import CheckpointManager, RestoreReport, SaveOptions, SavePolicy, TrainState
from fsdp_ckpt.errors import CheckpointError
from fsdp_ckpt.testing import run_ranks
from tests.deepspeed_jobs import EngineJob, Net, batch, plain_state, unequal
from tests.layouts import cut, live_parts, named_leaves

NUM_STEPS = 4  # before the save
ENGINES: Mapping[str, tuple[int, str, dict[str, Any]]] = {
    "zero3-bf16": (3, "bf16", {}),
    "zero1-bf16": (1, "bf16", {}),
    "zero1-fp32-grads": (1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),
    # So high a scale overflows at first: some steps are skipped, and the scale changes.
    "zero2-fp16": (2, "fp16", {"fp16": {"initial_scale_power": 22, "hysteresis": 1}}),
    "zero3-fp32": (3, "fp32", {}),
    "zero0-fp32": (0, "fp32", {}),
}
# Which other engine a checkpoint is resumed in, on each number of ranks.
LIKE = {"zero3-bf16": "zero1-bf16", "zero1-bf16": "zero3-bf16", "zero3-fp32": "zero0-fp32"}


def engine(name: str, seed: int) -> EngineJob:
    stage, precision, config = ENGINES[name]
    return EngineJob(stage, precision, seed=seed, **config)


def save(root: str, state: TrainState) -> None:
    with CheckpointManager(root, state, timeout_s=60) as manager:
        manager.save(mode="sync")


def restore(root: str, state: TrainState, step: int | None = None) -> RestoreReport:
    with CheckpointManager(root, state, timeout_s=60) as manager:
        return manager.restore(step)


def train_and_save(root: str) -> dict[str, Any]:
    """Train and save every engine, and resume it; return what is not as it was, and what was counted."""
    failures: list[str] = []
    counted: dict[str, Any] = {}
    for name in ENGINES:
        job = engine(name, seed=0)
        job.train(NUM_STEPS)
        whole, counted[name] = job.whole(), job.counted()
        save(f"{root}/{name}", job.state)
        if dist.get_rank() == 0:
            save_file(whole, f"{root}/{name}.safetensors")
        losses, trained = job.train(2), job.whole()
        again = engine(name, seed=1)
        restore(f"{root}/{name}", again.state)
        failures += compared(f"{name} again", again, whole, counted[name])
        if again.train(2) != losses:
            failures.append(f"{name}: other losses after the resume")
        failures += [f"{name} trained: {f}" for f in unequal(again.whole(), trained)]
    for source, target in LIKE.items():
        failures += resumed(root, source, target, counted[source])
    return {"failures": failures, "counted": counted, "refusals": refusals()}


def compared(
    title: str, job: EngineJob, whole: Mapping[str, torch.Tensor], counted: Mapping[str, Any]
) -> list[str]:
    found = unequal(job.whole(), whole)
    now = job.counted()
    found += [
        f"{key} is {now[key]}, not {counted[key]}" for key in counted if now[key] != counted[key]
    ]
    return [f"{title}: {f}" for f in found]


def resumed(root: str, source: str, target: str, counted: Mapping[str, Any]) -> list[str]:
    """Resume one engine's checkpoint in another; return what is not as it was."""
    job = engine(target, seed=1)
    restore(f"{root}/{source}", job.state)
    title = f"{source} -> {target} on {dist.get_world_size()}"
    found = compared(title, job, load_file(f"{root}/{source}.safetensors"), counted)
    job.train(1)  # goes on
    return found


def refusals() -> list[str]:
    """Return what is said about engines and moments that cannot be saved."""
    halfway = EngineJob(1, "fp32", gradient_accumulation_steps=2)
    halfway.engine.backward(halfway.engine(batch(0, torch.float32)))
    halfway.engine.step()
    told = [told_by(halfway.state.collect)]
    told.append(told_by(lambda: EngineJob(0, "bf16")))
    told.append(told_by(lambda: TrainState(engine=halfway.engine.module)))
    told.append(told_by(lambda: TrainState(engine=halfway.engine, model=halfway.engine.module)))
    return told


def told_by(call: Any) -> str:
    try:
        call()
    except CheckpointError as e:
        return str(e)
    return "nothing"


def resume_engines(root: str, counted: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Resume what 4 ranks saved, each in its own kind and in another."""
    failures: list[str] = []
    for source, like in LIKE.items():
        for target in (source, like):
            failures += resumed(root, source, target, counted[source])
    return failures


def resume_at_2(root: str, counted: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What 2 ranks do; see the module."""
    failures = resume_engines(root, counted)
    whole = load_file(f"{root}/zero3-fp32.safetensors")
    dropped: dict[str, Any] = {}
    for source, wrap in (("zero3-fp32", fsdp2), ("zero3-fp32", fsdp1), ("fsdp2", fsdp1)):
        state = plain_state(wrap(Net(2)))
        dropped[wrap.__name__] = restore(f"{root}/{source}", state).dropped
        failures += [f"{source} -> {wrap.__name__}: {f}" for f in unlike(state, whole)]
        save(f"{root}/{wrap.__name__}", state) if source != "fsdp2" else None
    derived: dict[str, Any] = {}
    for source in ("fsdp2", "fsdp1", "plain"):
        for target in ("zero3-fp32", "zero0-fp32"):
            job = engine(target, seed=3)
            derived[source] = restore(f"{root}/{source}", job.state).derived
            failures += compared(f"{source} -> {target}", job, whole, counted["zero3-fp32"])
            job.train(1)
    return {
        "failures": failures + managed(f"{root}/managed"),
        "dropped": dropped,
        "derived": derived,
    }


def managed(root: str) -> list[str]:
    """Save beside the steps, then go back in place; return what is not as it was."""
    failures: list[str] = []
    for stage in (1, 3):
        job = EngineJob(stage, "bf16")
        after: dict[int, dict[str, torch.Tensor]] = {}
        losses: dict[int, list[str]] = {}
        with CheckpointManager(
            f"{root}-{stage}",
            job.state,
            save=SavePolicy(every_steps=1),
            options=SaveOptions(mode="lazy"),
            timeout_s=60,
        ) as manager:
            for step in (1, 2, 3):
                losses[step] = job.train(1)
                after[step] = job.whole()
                manager.after_step()
            job.train(1)
            with torch.no_grad():  # leaves parameters gathered
                job.engine.module(batch(9, job.dtype))
            for step in (2, 1):
                manager.restore(step)
                failures += [f"stage {stage} back: {f}" for f in unequal(job.whole(), after[step])]
                if job.train(1) != losses[step + 1]:
                    failures.append(f"stage {stage}: another loss after going back to {step}")
    return failures


def fsdp2(net: Net) -> nn.Module:
    fully_shard(net.second)
    return fully_shard(net)


def fsdp1(net: Net) -> nn.Module:
    return FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))


def unlike(state: TrainState, whole: Mapping[str, torch.Tensor]) -> list[str]:
    """Return what of a state without DeepSpeed is not its part of what DeepSpeed had."""
    expected = {name: t for name, t in whole.items() if not name.startswith("used.")}
    names = {name for name, _ in named_leaves(state)}
    found = [f"{name} is missing" for name in expected.keys() - names if name.startswith("model.")]
    for name, box, part in live_parts(state):
        if name in expected and not torch.equal(part, cut(expected[name], box)):
            found.append(f"{name} at {box.offsets} is {part}")
    return found


def resume_plain(root: str) -> list[str]:
    """Resume without ranks what the engines saved, and save it again."""
    state = plain_state(Net(2))
    restore(f"{root}/zero3-fp32", state)
    save(f"{root}/plain", state)
    return unlike(state, load_file(f"{root}/zero3-fp32.safetensors"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def saved(root: Path) -> dict[str, Any]:
    """What rank 0 of 4 had, and the failures of all."""
    ranks = run_ranks(train_and_save, 4, str(root), timeout_s=240).values
    return {**ranks[0], "failures": [f for rank in ranks for f in rank["failures"]]}


def test_an_engine_resumes_to_the_bit_and_goes_on_so(saved: dict[str, Any]) -> None:
    """Masters, moments, used parameters, buffers, schedule, scale; the next losses; and stage 1 in 3."""
    assert saved["failures"] == []


def test_the_loss_scale_had_changed(saved: dict[str, Any]) -> None:
    """Steps were skipped and others were not: what was compared is no initial state."""
    scaled = saved["counted"]["zero2-fp16"]
    assert scaled["skipped"] > 0
    assert scaled["loss_scale"] < 2**22
    assert scaled["steps"] == [NUM_STEPS - scaled["skipped"]]


def test_what_cannot_be_saved_is_refused(saved: dict[str, Any]) -> None:
    """By one line that says what to do."""
    halfway, stage_0, module, twice = saved["refusals"]
    assert "gradients of 1 of 2 micro-batches" in halfway
    assert "set zero_optimization.stage to 1" in stage_0
    assert "expected what deepspeed.initialize returns first, found a Net" in module
    assert "give only the engine" in twice


def test_other_layouts_and_numbers_of_ranks(root: Path, saved: dict[str, Any]) -> None:
    """Engines, FSDP2, FSDP1 and one process take each other's checkpoints, to the bit."""
    assert resume_plain(str(root)) == []
    two = run_ranks(resume_at_2, 2, str(root), saved["counted"], timeout_s=240).values
    three = run_ranks(resume_engines, 3, str(root), saved["counted"], timeout_s=240).values
    assert [f for rank in two for f in rank["failures"]] == []
    assert [f for rank in three for f in rank] == []
    # The counters of engines are nothing to others, and follow from the step where there are none.
    assert two[0]["dropped"]["fsdp2"] == ("engine",)
    assert set(two[0]["derived"].values()) == {("engine",)}
