"""Staging memory: what is pinned when.

If a test needs CUDA's runtime, it has a fake of it.
"""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch

from spottrain.checkpoint.format.codec import Tensors
from spottrain.checkpoint.format.dcp import plan_save
from spottrain.checkpoint.saving.staging import Staged, StagingBuffer


class CudaRuntime:
    """Registers host memory as CUDA does: no byte twice.

    If it `refuses`, it registers nothing.
    """

    def __init__(self) -> None:
        self.refuses = False
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, begin: int, size: int, flags: int) -> int:  # noqa: N802
        overlaps = any(begin < other + length and other < begin + size for other, length in self.registered.items())
        if self.refuses or overlaps:
            return 712
        self.registered[begin] = size
        return 0

    def cudaHostUnregister(self, begin: int) -> int:  # noqa: N802
        del self.registered[begin]
        return 0


class RefusedError(torch.cuda.CudaError):
    def __init__(self) -> None:
        RuntimeError.__init__(self, "part or all of the requested memory range is already mapped (712)")


def check_error(result: int) -> None:
    if result != 0:
        raise RefusedError


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaRuntime:
    """That of a process that uses CUDA."""
    runtime = CudaRuntime()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    return runtime


def stage(buffer: StagingBuffer, size: int) -> Staged:
    tensors: Tensors = {"w": torch.arange(size, dtype=torch.uint8), "columns": torch.arange(6.0).view(2, 3).t()}
    return buffer.stage(plan_save(tensors, rank=0, group=None), tensors)


def sizes(cuda: CudaRuntime) -> list[int]:
    gc.collect()
    return sorted(cuda.registered.values())


def test_the_buffer_is_pinned_as_long_as_it_is_used(cuda: CudaRuntime) -> None:
    buffer = StagingBuffer()
    small: Any = stage(buffer, 64)
    large = stage(buffer, 200)
    assert sizes(cuda) == [64 + 64, 256 + 64], "what is still being written was unpinned"
    assert bytes(small.data[:64]) == bytes(range(64))
    del small
    assert sizes(cuda) == [256 + 64]
    del large, buffer
    assert sizes(cuda) == []


def test_a_node_that_cannot_pin_is_reported_and_goes_on(cuda: CudaRuntime, caplog: pytest.LogCaptureFixture) -> None:
    cuda.refuses = True
    with caplog.at_level(logging.WARNING):
        staged = stage(StagingBuffer(), 64)
    assert bytes(staged.data[:64]) == bytes(range(64))
    assert torch.frombuffer(staged.data, dtype=torch.float32, offset=64, count=6).tolist() == [0, 3, 1, 4, 2, 5]
    assert "The 128 bytes of memory that stage checkpoints can't be pinned" in caplog.text


def test_a_process_without_anything_on_the_gpu_pins_nothing(
    cuda: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    staged = stage(StagingBuffer(), 64)
    assert bytes(staged.data[:64]) == bytes(range(64))
    assert sizes(cuda) == []
