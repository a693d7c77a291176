"""From DeepSpeed's own checkpoints. Knows neither torch, DeepSpeed nor live training objects.

files of a tag --restricted unpickler--> contents, places of tensors --partitions--> ranges --> shard files
"""

from __future__ import annotations

from fsdp_ckpt.deepspeed.importer import DeepSpeedReport, import_deepspeed

__all__ = ["DeepSpeedReport", "import_deepspeed"]
