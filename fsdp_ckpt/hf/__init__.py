"""Between checkpoints and Hugging Face safetensors. Knows neither torch nor live training objects.

What works on live models is :mod:`fsdp_ckpt.weights`; its public names are here too, loaded on first use
(PEP 562), so that the command line starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fsdp_ckpt.hf.consolidate import ConsolidateReport, consolidate
from fsdp_ckpt.hf.copying import CopyOptions
from fsdp_ckpt.hf.importer import ImportReport, import_model
from fsdp_ckpt.hf.reshard import ReshardReport, reshard
from fsdp_ckpt.hf.selection import Selection

if TYPE_CHECKING:
    from fsdp_ckpt.hf.ranked import consolidate_on_ranks
    from fsdp_ckpt.weights.export import ExportOptions, ExportReport, export
    from fsdp_ckpt.weights.load import LoadReport, load

_HOME_OF = {
    "consolidate_on_ranks": "fsdp_ckpt.hf.ranked",
    "ExportOptions": "fsdp_ckpt.weights.export",
    "ExportReport": "fsdp_ckpt.weights.export",
    "export": "fsdp_ckpt.weights.export",
    "LoadReport": "fsdp_ckpt.weights.load",
    "load": "fsdp_ckpt.weights.load",
}

__all__ = [
    "ConsolidateReport",
    "CopyOptions",
    "ExportOptions",
    "ExportReport",
    "ImportReport",
    "LoadReport",
    "ReshardReport",
    "Selection",
    "consolidate",
    "consolidate_on_ranks",
    "export",
    "import_model",
    "load",
    "reshard",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
