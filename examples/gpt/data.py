"""Text that every machine has: the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch

_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3"}


class StandardLibrary:
    """Windows of `context` bytes and the bytes that follow each of them."""

    def __init__(self, context: int) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        paths = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
        texts = [(folder / path).read_bytes() for path in paths if not _LEFT_OUT.intersection(path.parts)]
        self._text = np.frombuffer(b"".join(texts), dtype=np.uint8)
        self._context = context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = index * self._context
        window = torch.from_numpy(self._text[begin : begin + self._context + 1].astype(np.int64))
        return window[:-1], window[1:]
