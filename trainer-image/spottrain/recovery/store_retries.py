"""Retrying what needs the store, if nothing can go on without it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from spottrain.checkpoint.errors import CheckpointError, Fenced, StepBehind, StorageDenied, UnsupportedState
from spottrain.checkpoint.stores.storage import PAUSES

T = TypeVar("T")


def retry(
    work: Callable[[], T],
    *,
    when: Callable[[CheckpointError], bool],
    on_error: Callable[[CheckpointError], None],
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call `work` until it succeeds, at most once more than there are `PAUSES`.

    Args:
        work: Raises CheckpointError if it fails.
        when: Whether to retry after this error.
        on_error: Called with each error that is followed by a retry.
        sleep: Waits so many seconds before a retry.

    Returns:
        What `work` returned.

    Raises:
        CheckpointError: `work` failed for the last time, or with an error after which `when` says no.
    """
    for pause in PAUSES:
        try:
            return work()
        except CheckpointError as error:
            if not when(error):
                raise
            on_error(error)
        sleep(pause)
    return work()


def may_succeed_later(error: CheckpointError) -> bool:
    """Whether the same save may succeed a little later."""
    return not isinstance(error, Fenced | StepBehind | StorageDenied | UnsupportedState)
