"""How a store that doesn't answer is waited for."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from spottrain.checkpoint.errors import (
    CheckpointError,
    CredentialsMissing,
    Fenced,
    SaveFailed,
    StepBehind,
    StorageDenied,
    StorageFull,
    StorageMissing,
    StorageUnavailable,
    UnsupportedState,
)
from spottrain.checkpoint.stores.storage import PAUSES
from spottrain.recovery.store_retries import may_succeed_later, retry


@dataclass
class Store:
    """Raises one error after the other, then answers."""

    errors: list[CheckpointError]
    slept: list[float] = field(default_factory=list)
    reported: list[CheckpointError] = field(default_factory=list)

    def work(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "done"

    def run(self) -> str:
        return retry(self.work, when=may_succeed_later, on_error=self.reported.append, sleep=self.slept.append)


def test_each_failure_is_reported_and_followed_by_a_longer_pause() -> None:
    errors: list[CheckpointError] = [StorageUnavailable("one"), StorageFull("two")]
    store = Store(list(errors))
    assert store.run() == "done"
    assert (store.slept, store.reported) == (list(PAUSES[:2]), errors)


def test_the_last_try_fails_as_the_store_does() -> None:
    store = Store([*(StorageUnavailable("again") for _ in PAUSES), StorageUnavailable("last")])
    with pytest.raises(StorageUnavailable, match="last"):
        store.run()
    assert store.slept == list(PAUSES)


def test_what_would_fail_again_is_not_tried_again() -> None:
    store = Store([StorageUnavailable("one"), StorageDenied("two")])
    with pytest.raises(StorageDenied, match="two"):
        store.run()
    assert store.slept == [PAUSES[0]]


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (StorageUnavailable(""), True),
        (StorageFull(""), True),
        (CredentialsMissing(""), True),
        (SaveFailed(""), True),
        (StorageDenied(""), False),
        (StorageMissing(""), False),
        (StepBehind(""), False),
        (UnsupportedState(""), False),
        (Fenced("", fence=2), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_saves_may_succeed_later(error: CheckpointError, passes: bool) -> None:
    assert may_succeed_later(error) is passes
