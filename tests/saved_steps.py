"""Saves of a small state, and what a later generation finds of them.

The values of the state are its step.
"""

from __future__ import annotations

from typing import Any

import torch

from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.saving.retention import Retention


def checkpointer(storage: Any, generation: int, retention: Retention | None = None) -> Checkpointer:
    return Checkpointer(storage, generation=generation, attempt_id="a", rank=0, world_size=1, retention=retention)


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((3, 2), float(step))}, "step": step}


def save(storage: Any, generation: int, *steps: int) -> None:
    saver = checkpointer(storage, generation)
    if (newest := saver.latest()) is not None:
        saver.load(lambda _: state(0), newest)
    for step in steps:
        saver.save(state(step), step=step, extra={"step": step})


def resumed_step(storage: Any, generation: int) -> int:
    """Return the step that the next generation resumes from; check its values."""
    resumed = checkpointer(storage, generation)
    newest = resumed.latest(verify=True)
    assert newest is not None
    into = state(0)
    loaded = resumed.load(lambda _: into, newest)
    assert into["step"] == newest.step == loaded.step == loaded.extra["step"]
    assert torch.equal(into["model"]["w"], torch.full((3, 2), float(newest.step)))
    return newest.step
