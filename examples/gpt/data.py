"""Text that every machine has: the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch


class StandardLibrary:
    """Windows of `context` bytes, and for each byte the one that follows."""

    def __init__(self, context: int) -> None:
        # The modules alone, without packages: 5 MB are enough, and every generation reads them again.
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self._text = np.frombuffer(b"".join(path.read_bytes() for path in paths), dtype=np.uint8)
        self._context = context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = index * self._context
        window = torch.from_numpy(self._text[begin : begin + self._context + 1].astype(np.int64))
        return window[:-1], window[1:]
