"""Rolling back while the store does not answer."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spottrain
from spottrain.checkpoint.errors import StorageUnavailable
from spottrain.checkpoint.format.commits import Head
from spottrain.checkpoint.format.head import fence, read_head
from spottrain.checkpoint.stores.uri import open_storage
from spottrain.recovery import store_retries
from spottrain_api.settings.choices import StabilityAction
from spottrain_api.settings.stability import StabilityConfig

pytestmark = pytest.mark.usefixtures("world_of_its_own")

BAD_STEP = 5


@pytest.fixture(autouse=True)
def _sigterm_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class Outage:
    """A store that fails so many reads of the newest commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tries_left = 0
        self.is_followed_by_notice = False
        monkeypatch.setattr("spottrain.checkpoint.checkpointer.fence", self.fence)

    def fence(self, *arguments: Any, **options: Any) -> Head:
        if self.tries_left:
            self.tries_left -= 1
            if self.is_followed_by_notice:
                signal.raise_signal(signal.SIGTERM)
            raise StorageUnavailable("the store does not answer")
        return fence(*arguments, **options)


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> Outage:
    return Outage(monkeypatch)


def train(folder: Path, outage: Outage, tries: int) -> list[int]:
    """The steps of a run that rolls back at BAD_STEP, while the store is away."""
    stability = StabilityConfig(non_finite=StabilityAction.ROLLBACK)
    done: list[int] = []
    with spottrain.session(
        strategy="ddp",
        global_batch=1,
        micro_batch=1,
        checkpoint_uri=f"file://{folder}",
        checkpoint_interval="2steps",
        stability=stability,
    ) as session:
        training = session.prepare(
            nn.Linear(1, 1),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
            dataset=[torch.ones(1)] * 8,
        )
        for step in training.steps(total=8):
            for batch in step.micro_batches():
                loss = training.model(batch).square().mean()
                step.backward(loss * math.nan if step.number == BAD_STEP else loss)
            if step.number == BAD_STEP:
                _await_commit(folder)
                outage.tries_left = tries
            step.update()
            done.append(step.number)
    return done


def _await_commit(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while (head := read_head(open_storage(f"file://{folder}"))) is None or head.newest is None:
        assert time.monotonic() < deadline


def test_a_rollback_waits_for_its_store(tmp_path: Path, outage: Outage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_retries, "PAUSES", (0, 0))
    assert train(tmp_path, outage, tries=2) == list(range(1, 9))
    assert outage.tries_left == 0


def test_a_drain_ends_a_rollback_that_waits_for_its_store(tmp_path: Path, outage: Outage) -> None:
    outage.is_followed_by_notice = True
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, outage, tries=100)
    assert ended.value.code in (0, None)
    assert outage.tries_left == 99
