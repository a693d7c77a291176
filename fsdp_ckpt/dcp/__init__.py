"""The plugin for ``torch.distributed.checkpoint``: planners, StorageWriter and StorageReader."""

from fsdp_ckpt.dcp.load_planner import ReshardLoadPlanner
from fsdp_ckpt.dcp.reader import ShardedStorageReader
from fsdp_ckpt.dcp.save_planner import ShardSavePlanner
from fsdp_ckpt.dcp.writer import ShardedStorageWriter

__all__ = [
    "ReshardLoadPlanner",
    "ShardSavePlanner",
    "ShardedStorageReader",
    "ShardedStorageWriter",
]
