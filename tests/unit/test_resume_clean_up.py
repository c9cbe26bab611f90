"""What a resume deletes, because a drain doesn't wait for it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import spottrain
from cluster_fixtures import wait_for
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.stores.uri import open_storage

pytestmark = pytest.mark.usefixtures("world_of_its_own")


@pytest.fixture(autouse=True)
def _sigterm_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def committed_steps(uri: str) -> list[int]:
    head = read_head(open_storage(uri))
    return [commit.step for commit in head.commits] if head is not None else []


def train_until_drained(uri: str, *, kept: int) -> None:
    """Train until the drain that a notice in the first step starts.

    In this step, a clean-up leaves `kept` commits.
    """
    with spottrain.session(global_batch=1, micro_batch=1, checkpoint_uri=uri) as session:
        training = session.prepare(
            nn.Linear(1, 1),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
            dataset=[torch.ones(1)] * 8,
        )
        for step in training.steps(total=1000):
            for batch in step.micro_batches():
                step.backward(training.model(batch).square().mean())
            wait_for(lambda: len(committed_steps(uri)) == kept, "a clean-up ends")
            signal.raise_signal(signal.SIGTERM)
            step.update()


def test_commits_of_drains_go_after_the_next_resume(tmp_path: Path) -> None:
    uri, drained = f"file://{tmp_path}", []
    for kept in (0, 1, 2, 2, 2):
        with pytest.raises(SystemExit):
            train_until_drained(uri, kept=kept)
        drained.append(committed_steps(uri)[0])
    assert committed_steps(uri) == drained[:-4:-1]
