"""Who persists images: a process without torch, or a thread. Knows bytes and stores, not what they mean."""

from fsdp_ckpt.writer.handover import FileName
from fsdp_ckpt.writer.job import PendingWrite, ShardWriter, WriteJob
from fsdp_ckpt.writer.process import ProcessWriter
from fsdp_ckpt.writer.thread import ThreadWriter

__all__ = ["FileName", "PendingWrite", "ProcessWriter", "ShardWriter", "ThreadWriter", "WriteJob"]
