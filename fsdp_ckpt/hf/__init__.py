"""Between checkpoints and Hugging Face safetensors. Knows neither torch nor live training objects."""

from fsdp_ckpt.hf.consolidate import ConsolidateReport, consolidate

__all__ = ["ConsolidateReport", "consolidate"]
