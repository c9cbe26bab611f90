"""Random numbers that continue after a resume.

At the same world size, every rank restores the state that it had. At a different world size no rank is the same as
before, so all are seeded from (seed, step, rank).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int, *, step: int = 0, rank: int = 0) -> None:
    """Seed Python, numpy and torch (all devices) with a hash of the three numbers."""
    number = _number(seed, step, rank)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def seed_host(seed: int, *, step: int) -> None:
    """Seed as `seed_everything`, except for the accelerators' generators. That takes a tenth of the time."""
    number = _number(seed, step, 0)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)


def draw_from_host() -> tuple[int, bytes, int]:
    """Draw a number from each of the host's generators. It shows where they are, much sooner than their states do."""
    of_torch = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=torch.default_generator)
    return random.getrandbits(64), np.random.bytes(8), int(of_torch)


@contextmanager
def host_untouched() -> Iterator[None]:
    """Restore the host's generators afterwards, whatever was drawn from them inside."""
    python, legacy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_rng_state(of_torch)


def capture() -> dict[str, Any]:
    """The state of every generator, as plain values that a checkpoint can hold."""
    numpy_kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (str(numpy_kind), np.asarray(keys).tobytes(), int(position), int(has_gauss), float(cached)),
        "torch": _bytes(torch.get_rng_state()),
        "cuda": _bytes(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }


def restore(state: dict[str, Any]) -> None:
    """Set every generator to what `capture` returned."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _number(seed: int, step: int, rank: int) -> int:
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(state.numpy().tobytes())


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
