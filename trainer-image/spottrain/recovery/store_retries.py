"""How long a store that doesn't answer is waited for, where nothing can go on without it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from spottrain.checkpoint.errors import CheckpointError, Fenced, StepBehind, StorageDenied, UnsupportedState

T = TypeVar("T")

# Between tries to commit the last step, or to read the newest commit at the start, in seconds: five minutes in all.
PAUSES = (1, 2, 4, 8, 15, 30, 60, 60, 60, 60)


def patiently(
    work: Callable[[], T],
    *,
    may_pass: Callable[[CheckpointError], bool],
    failed: Callable[[CheckpointError], None],
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """What `work` returns, which is tried again after each of PAUSES where its error may pass; `failed` hears of
    those, and `sleep` waits between. Raises CheckpointError, and what `sleep` raises."""
    for pause in PAUSES:
        try:
            return work()
        except CheckpointError as error:
            if not may_pass(error):
                raise
            failed(error)
        sleep(pause)
    return work()


def may_pass(error: CheckpointError) -> bool:
    """Whether the same save may succeed a little later."""
    return not isinstance(error, Fenced | StepBehind | StorageDenied | UnsupportedState)
