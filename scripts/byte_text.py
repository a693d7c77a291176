"""Text that is on every machine: the sources of Python's standard library, one token per byte."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

__all__ = ["StdlibText", "decode", "encode"]


def encode(text: str) -> torch.Tensor:
    """Return the UTF-8 bytes of ``text``, int64, shape (num_bytes,)."""
    return torch.tensor(list(text.encode()), dtype=torch.int64)


def decode(tokens: torch.Tensor) -> str:
    """Return the text of tokens, shape (num_bytes,)."""
    return bytes(tokens.tolist()).decode(errors="replace")


class StdlibText(Dataset[tuple[int, torch.Tensor]]):
    """Windows of text, each with its sample id; where a window starts is random in each epoch.

    Args:
        num_samples: Windows per epoch.
        seq_len: Tokens per window.

    Raises:
        ValueError: The standard library is too short.
    """

    def __init__(self, num_samples: int, seq_len: int) -> None:
        self.num_samples = num_samples
        self.seq_len = seq_len
        num_bytes = (num_samples + 1) * seq_len  # the last window may start up to seq_len later
        text = bytearray()
        # By name, since the order of a folder differs between machines; _sysconfigdata*.py differs too.
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
            if len(text) < num_bytes:
                text += path.read_bytes()
        if len(text) < num_bytes:
            raise ValueError(
                f"the standard library has {len(text)} bytes here, {num_bytes} are wanted"
            )
        self.tokens = torch.frombuffer(text[:num_bytes], dtype=torch.uint8)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        """Return the sample's id and tokens, int64, shape (seq_len,)."""
        start = index * self.seq_len + random.randrange(self.seq_len)
        return index, self.tokens[start : start + self.seq_len].long()
