"""Models in Hugging Face's form, and as other libraries write them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.weights import INDEX, Kinds

__all__ = ["different_kinds", "write_files"]


def write_files(folder: Path, tensors: dict[str, torch.Tensor], num_files: int = 1) -> Path:
    """Write a model as Hugging Face libraries do; return its folder."""
    folder.mkdir()
    tensors = {name: t.detach().contiguous() for name, t in tensors.items()}
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(num_files):
        file = f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
        save_file({n: tensors[n] for n in names[i::num_files]}, folder / file)
        weight_map |= dict.fromkeys(names[i::num_files], file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def different_kinds() -> Kinds:
    """Return a model that equals ``Kinds()`` nowhere."""
    model = Kinds()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor.float() + 3)
    return model
