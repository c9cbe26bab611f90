"""A generation is ready for its first save before that begins.

The first save may be the drain's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import spottrain
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.stores.uri import open_storage
from staging_memory import staging_memory

WIDTH = 64
STATE_BYTES = 3 * (WIDTH * WIDTH + WIDTH) * 4  # weights and AdamW's two moments


pytestmark = pytest.mark.usefixtures("world_of_its_own")


def staging_at_steps(uri: str, total: int) -> dict[int, int]:
    """Train up to step `total`; how much staging memory there was in each step.

    Nothing is saved but the last.
    """
    found = {}
    before = staging_memory()
    with spottrain.session(strategy="ddp", global_batch=4, micro_batch=4, checkpoint_uri=uri) as session:
        training = session.prepare(
            nn.Linear(WIDTH, WIDTH),
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
            dataset=[torch.full((WIDTH,), float(index)) for index in range(8)],
        )
        for step in training.steps(total=total):
            found[step.number] = max(size for inode, size in staging_memory().items() if inode not in before)
            for batch in step.micro_batches():
                step.backward(training.model(batch).square().mean())
            step.update()
            head = read_head(open_storage(uri))
            assert head is None or head.newest is None or head.newest.step < step.number
    return found


def test_memory_for_the_first_save_is_there_after_the_first_step_and_after_a_resume(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/checkpoints"
    fresh = staging_at_steps(uri, 3)
    assert fresh[1] < STATE_BYTES <= fresh[2]  # the first step makes the optimizer's state

    resumed = staging_at_steps(uri, 4)
    assert resumed == {4: resumed[4]}
    assert resumed[4] >= STATE_BYTES
