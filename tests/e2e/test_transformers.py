"""transformers loads what consolidation writes: no key missing, none too many, the same logits to the bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_ckpt import CheckpointManager, TrainState
from fsdp_ckpt.hf import ConsolidateReport, consolidate
from fsdp_ckpt.testing import run_ranks

pytestmark = [pytest.mark.few_ranks, pytest.mark.slow]

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

KINDS = ("llama", "llama-tied", "llama-bf16", "gpt2")


def make_config(kind: str) -> Any:
    from transformers import GPT2Config, LlamaConfig

    if kind == "gpt2":
        return GPT2Config(vocab_size=101, n_positions=32, n_embd=24, n_layer=2, n_head=3)
    return LlamaConfig(
        vocab_size=101,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=kind == "llama-tied",
        dtype="bfloat16" if kind == "llama-bf16" else "float32",
    )


def make_model(kind: str) -> nn.Module:
    """Build the same model in every process that asks for this kind."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    config = make_config(kind)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()
    return model


def logits(model: nn.Module) -> torch.Tensor:
    tokens = torch.arange(30).reshape(2, 15) * 7 % 101
    with torch.no_grad():
        result: torch.Tensor = model(tokens).logits
    return result


def save_sharded(root: str, kind: str) -> None:
    """Save an FSDP2 model; on each rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model(kind)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.transformer.h if kind == "gpt2" else model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with CheckpointManager(root, TrainState(model=model)) as manager:
        manager.save(mode="sync")


def check_loads(model: nn.Module, out: Path, report: ConsolidateReport) -> None:
    """Load the output as a user does, and compare."""
    from transformers import AutoModelForCausalLM

    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert {name: list(keys) for name, keys in info.items() if keys} == {}
    assert loaded.dtype == model.dtype
    assert torch.equal(logits(loaded.eval()), logits(model))
    state, found = model.state_dict(), loaded.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert report.num_tensors == len({tensor.data_ptr() for tensor in state.values()})


@pytest.mark.parametrize("max_shard_bytes", [10_000, 5_000_000_000])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_model_loads(tmp_path: Path, kind: str, max_shard_bytes: int) -> None:
    """Untied and tied, in one file and in many, with the configuration copied beside them."""
    model, out = make_model(kind), tmp_path / "out"
    make_config(kind).save_pretrained(tmp_path / "origin")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(20).reshape(2, 10)).logits.square().mean().backward()
    optimizer.step()
    state = TrainState(model=model, optimizer=optimizer)
    with CheckpointManager(tmp_path / "run", state) as manager:
        manager.save(mode="sync")
    report = consolidate(
        tmp_path / "run", out, max_shard_bytes=max_shard_bytes, config_from=tmp_path / "origin"
    )
    assert (len(report.files) > 1) == (max_shard_bytes == 10_000)
    check_loads(model, out, report)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_two_sharded_ranks_give_the_same_files_as_one_process(tmp_path: Path, kind: str) -> None:
    """What consolidation writes does not tell how many ranks saved."""
    model = make_model(kind)
    run_ranks(save_sharded, 2, str(tmp_path / "sharded"), kind)
    with CheckpointManager(tmp_path / "whole", TrainState(model=model)) as manager:
        manager.save(mode="sync")
    outputs = []
    for name in ("sharded", "whole"):
        out = tmp_path / f"{name}-out"
        report = consolidate(tmp_path / name, out, max_shard_bytes=10_000)
        outputs.append({path.name: path.read_bytes() for path in sorted(out.iterdir())})
    assert outputs[0] == outputs[1]
    make_config(kind).save_pretrained(out)
    check_loads(model, out, report)


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_sizes_are_those_of_save_pretrained(tmp_path: Path, kind: str) -> None:
    """The same keys and total size, as far as transformers says them."""
    model = make_model(kind)
    with CheckpointManager(tmp_path / "run", TrainState(model=model)) as manager:
        manager.save(mode="sync")
    consolidate(tmp_path / "run", tmp_path / "ours", max_shard_bytes=10_000)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    ours, theirs = (
        json.loads((tmp_path / name / "model.safetensors.index.json").read_text())
        for name in ("ours", "theirs")
    )
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
