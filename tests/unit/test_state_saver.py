"""Reports about a save while it is under way."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from memory_storage import MemoryStorage
from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.errors import RanksDiffer
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.saving.retention import Retention
from spottrain.checkpoint.stores.storage import Buffer, Pieces
from spottrain.recovery.interval import CommitInterval
from spottrain.recovery.reports import CheckpointReports
from spottrain.recovery.saver import StateSaver
from spottrain.recovery.schedule import CheckpointSchedule
from spottrain.world.progress import ProgressReporter
from spottrain_api.contract.reports import FailureReason

NOTHING_ELSE = {"extra": dict, "alike": tuple, "rank_state": dict}
STATE = cast(Any, SimpleNamespace(tensors=lambda: {"w": torch.ones(3)}, frozen=set, **NOTHING_ELSE))


class HangingStorage(MemoryStorage):
    """What is written of a step arrives when `goes_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def upload(self, key: str, data: Buffer | Pieces) -> None:
        assert self.goes_on.wait(60)
        super().upload(key, data)


@pytest.fixture
def storage() -> Iterator[HangingStorage]:
    hanging = HangingStorage()
    yield hanging
    hanging.goes_on.set()


def saver_to(storage: HangingStorage, *, slow_seconds: float) -> StateSaver:
    schedule = CheckpointSchedule(interval=CommitInterval(seconds=1))
    reporter = ProgressReporter(None, local_rank=0, generation=1)
    return StateSaver(
        checkpointer=Checkpointer(storage, generation=1, attempt_id="a", rank=0, world_size=1),
        schedule=schedule,
        reports=CheckpointReports(reporter=reporter, schedule=schedule),
        retention=Retention(),
        slow_seconds=slow_seconds,
    )


def save(saver: StateSaver, step: int) -> None:
    saver.save_in_background(STATE, step)
    ended(saver, step)


def ended(saver: StateSaver, step: int) -> None:
    """Wait until the save of `step` has become the newest commit."""
    deadline = time.monotonic() + 60
    while (commit := saver.reports.reporter.progress.commit) is None or commit.step < step:
        assert time.monotonic() < deadline
        saver.poll()


def test_a_save_says_how_long_it_kept_training_waiting_and_when_the_next_is_due(storage: HangingStorage) -> None:
    saver = saver_to(storage, slow_seconds=0.0)
    save(saver, 10)
    first = saver.reports.reporter.progress
    assert first.checkpoint is not None
    assert first.stalled_seconds == first.checkpoint.staging_seconds > 0.0
    assert first.checkpoint_interval_seconds == 1.0
    save(saver, 20)
    assert saver.reports.reporter.progress.stalled_seconds > first.stalled_seconds


def test_a_save_that_hangs_is_reported_until_it_ends(storage: HangingStorage) -> None:
    saver = saver_to(storage, slow_seconds=0.0)
    save(saver, 10)
    storage.goes_on.clear()
    saver.save_in_background(STATE, 20)
    deadline = time.monotonic() + 60
    while (failure := saver.reports.reporter.progress.checkpoint_failure) is None:
        assert time.monotonic() < deadline
        saver.poll()
    assert failure.reason is FailureReason.CHECKPOINT_STORAGE_UNAVAILABLE
    said = r"The checkpoint at step 20 has been under way for \d+ s, and \d+\.\d s were forecast"
    assert re.search(said, failure.message)
    storage.goes_on.set()
    ended(saver, 20)
    assert saver.reports.reporter.progress.checkpoint_failure is None


@pytest.mark.parametrize("saved_before", [False, True], ids=["without a forecast", "with a forecast"])
def test_a_save_that_takes_a_moment_is_no_failure(storage: HangingStorage, saved_before: bool) -> None:
    saver = saver_to(storage, slow_seconds=3600.0 if saved_before else 0.0)
    if saved_before:
        save(saver, 10)
    storage.goes_on.clear()
    saver.save_in_background(STATE, 20)
    saver.poll()
    assert saver.reports.reporter.progress.checkpoint_failure is None
    storage.goes_on.set()
    ended(saver, 20)


def test_what_a_save_of_frozen_weights_took_is_no_forecast_of_the_next(storage: HangingStorage) -> None:
    """A drain doesn't give up a commit of adapters for want of time.

    The commit of the large model took long, and is no forecast.
    """
    tensors = {"base": torch.ones(1000), "adapter": torch.ones(3)}
    lora = cast(Any, SimpleNamespace(tensors=lambda: tensors, frozen=lambda: {"base"}, **NOTHING_ELSE))
    saver = saver_to(storage, slow_seconds=3600.0)
    forecasts = []
    for step in (10, 20):
        saver.save_in_background(lora, step)
        ended(saver, step)
        forecasts.append(saver.forecast_seconds())
    assert forecasts[0] is None
    assert forecasts[1] is not None


def test_the_end_of_a_run_leaves_deletes_that_take_long_to_the_next_clean_up(
    storage: HangingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2500):
        storage.put(f"attempts/g000000-s000000001-lost/{number}", b"")
    saver = saver_to(storage, slow_seconds=3600.0)
    save(saver, 10)
    left = []
    monkeypatch.setattr("spottrain.recovery.saver.CLEAN_UP_SECONDS", 0.0)
    for _ in range(3):
        saver.clean_up()
        left.append(len(list(storage.list("attempts/g000000-"))))
    assert left == [1500, 500, 0]


class Sent:
    """Stands for the replicas: the values that were sent."""

    def __init__(self) -> None:
        self.values: list[tuple[dict[str, Any], Any]] = []

    def replicate(self, tensors: dict[str, Any], *, extra: Any, **_: Any) -> None:
        codec.split(tensors)
        self.values.append((tensors, extra))

    def explain(self, step_seconds: float | None) -> str:
        return ""


def test_a_replica_is_without_what_it_cannot_hold(storage: HangingStorage) -> None:
    tensors = {
        "optimizer": {"state": {"good": {"m": torch.ones(2)}, "bad": {"m": object()}}},
        "stateful.good": {"n": 1},
        "stateful.bad": {"n": object()},
    }
    records = {"times": {"n": 1}, "names": {"n": object()}}
    extra = {"optimizers": ["optimizer"], "stateful": ["good", "bad"], "records": records}
    state = cast(Any, SimpleNamespace(tensors=lambda: tensors, extra=lambda: extra, rank_state=dict))
    saver, sent = saver_to(storage, slow_seconds=0.0), Sent()
    saver.replicas = cast(Any, sent)
    saver.replicate(state, 3)
    [(found, values)] = sent.values
    assert found["optimizer"]["state"].keys() == {"good"}
    assert {"stateful.good", "stateful.bad"} & found.keys() == {"stateful.good"}
    assert values["stateful"] == ["good"]
    assert values["records"] == {"times": {"n": 1}}


def save_apart(tensors: dict[str, Any], **_: Any) -> list[str]:
    """As a checkpointer whose ranks have come apart in two parts of the script's state."""
    for name in ("stateful.best", "stateful.seen"):
        if name in tensors:
            raise RanksDiffer(f"Rank 1 has another {name}.", f"{name}.loss")
    return list(tensors)


def test_a_save_leaves_out_parts_in_which_the_ranks_have_come_apart(
    storage: HangingStorage, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {"best": torch.ones(2), "stateful.best": {"loss": 1.0}, "stateful.seen": {"loss": 2.0}}
    extra: dict[str, Any] = {"optimizers": [], "stateful": ["best", "seen", "rest"], "records": {}}
    contents = NOTHING_ELSE | {"frozen": set, "tensors": lambda: tensors, "extra": lambda: extra}
    saver = saver_to(storage, slow_seconds=0.0)
    assert saver._saved_as_far_as_possible(save_apart, cast(Any, SimpleNamespace(**contents)), 3) == ["best"]
    [said] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    for name in ("best", "seen"):
        assert f"The checkpoint of step 3 is without the state of {name} (stateful)" in said
