"""Small transformers models of the kinds that tie weights differently, in every layout."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

os.environ["HF_HUB_OFFLINE"] = "1"

__all__ = [
    "KINDS",
    "Sharding",
    "make_config",
    "make_empty_model",
    "make_model",
    "model_class",
    "outputs_of",
]

KINDS = ("llama", "llama-tied", "gpt2", "bert", "t5")
SIZES = {"vocab_size": 101, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}


def make_config(kind: str) -> Any:
    """Return the configuration of a kind; all are untied, or tied in the way of their kind."""
    import transformers as hf

    match kind:
        case "gpt2":
            return hf.GPT2Config(vocab_size=101, n_positions=32, n_embd=24, n_layer=2, n_head=4)
        case "bert":
            return hf.BertConfig(**SIZES, intermediate_size=40, max_position_embeddings=32)
        case "t5":
            return hf.T5Config(
                vocab_size=101, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4
            )
        case _:
            return hf.LlamaConfig(
                **SIZES,
                intermediate_size=40,
                num_key_value_heads=2,
                max_position_embeddings=32,
                tie_word_embeddings=kind == "llama-tied",
            )


def model_class(kind: str) -> Any:
    import transformers as hf

    return {
        "gpt2": hf.GPT2LMHeadModel,
        "bert": hf.BertForMaskedLM,
        "t5": hf.T5ForConditionalGeneration,
    }.get(kind, hf.LlamaForCausalLM)


def make_model(kind: str) -> nn.Module:
    """Build the same model in every process that asks for this kind."""
    torch.manual_seed(1)
    model: nn.Module = model_class(kind)(make_config(kind)).eval()
    with torch.no_grad():  # no tensor is left at zero or one, which a lost one would be too
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter) / 100)
    return model


def make_empty_model(kind: str) -> nn.Module:
    """Build the model without memory, but for what no file holds, which is a model's own to compute."""
    with torch.device("meta"):
        empty: nn.Module = model_class(kind)(make_config(kind)).eval()
    model = make_model(kind)
    for path, module in empty.named_modules():
        for name in module._non_persistent_buffers_set:
            module._buffers[name] = model.get_submodule(path)._buffers[name]
    return empty


def outputs_of(kind: str, model: nn.Module) -> torch.Tensor:
    """Return the logits for some tokens."""
    tokens = torch.arange(30).reshape(2, 15) * 7 % 101
    inputs = {"input_ids": tokens}
    if kind == "t5":
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad():
        found: torch.Tensor = model(**inputs).logits
    return found


def blocks_of(kind: str, model: Any) -> Iterator[tuple[nn.ModuleList, int]]:
    """Yield where each block of the model stands."""
    match kind:
        case "gpt2":
            lists = [model.transformer.h]
        case "bert":
            lists = [model.bert.encoder.layer]
        case "t5":
            lists = [model.encoder.block, model.decoder.block]
        case _:
            lists = [model.model.layers]
    yield from ((blocks, i) for blocks in lists for i in range(len(blocks)))


class Sharding:
    """Wraps models, all on the same meshes; called by every rank alike."""

    def __init__(self) -> None:
        self.world_size = dist.get_world_size()
        self.line = init_device_mesh("cpu", (self.world_size,))
        self.wraps: dict[str, Callable[[str, nn.Module], nn.Module]] = {
            "fsdp2": lambda kind, model: self.fsdp2(kind, model, self.line),
            "fsdp1": self.fsdp1,
        }
        if self.world_size == 4:
            grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
            self.wraps["hsdp"] = lambda kind, model: self.fsdp2(kind, model, grid)
            self.wraps["tp-fsdp2"] = lambda kind, model: self.fsdp2(
                kind, cut_linears(kind, model, grid["inner"]), grid["outer"]
            )

    def fsdp2(self, kind: str, model: nn.Module, mesh: Any) -> nn.Module:
        """Shard block by block, then the rest, in which the tied weights are."""
        for blocks, i in blocks_of(kind, model):
            fully_shard(blocks[i], mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def fsdp1(self, kind: str, model: nn.Module) -> nn.Module:
        """Flatten block by block, then the rest."""

        def wrap(module: nn.Module) -> nn.Module:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # FSDP1 is deprecated
                return FullyShardedDataParallel(
                    module,
                    use_orig_params=True,
                    device_mesh=self.line,
                    device_id=torch.device("cpu"),
                )

        for blocks, i in blocks_of(kind, model):
            blocks[i] = wrap(blocks[i])
        return wrap(model)


def cut_linears(kind: str, model: nn.Module, mesh: Any) -> nn.Module:
    """Cut the matrices of every block by columns and by rows in turn, as tensor parallelism does."""
    for blocks, i in blocks_of(kind, model):
        matrices = [m for m in blocks[i].modules() if getattr(m, "weight", None) is not None]
        for number, module in enumerate(m for m in matrices if m.weight.ndim == 2):
            cut = distribute_tensor(module.weight.detach(), mesh, [Shard(number % 2)])
            module.weight = nn.Parameter(cut)
    return model
