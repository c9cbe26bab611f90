"""How often a source may do something: a token bucket for each."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

# Sources that did nothing for longest are forgotten first. Their buckets are full by then.
MAX_SOURCES = 10_000


class RateLimit:
    """Limits how often each source may pass.

    A source passes `burst` times at once, and `per_second` times a second after that.
    """

    def __init__(self, *, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, and when

    def allows(self, source: str) -> bool:
        """Whether the source may pass now. If so, it has passed."""
        now = self._clock()
        left, at = self._buckets.pop(source, (float(self._burst), now))
        left = min(self._burst, left + self._per_second * (now - at))
        allowed = left >= 1
        self._buckets[source] = (left - 1 if allowed else left, now)
        if len(self._buckets) > MAX_SOURCES:
            self._buckets.popitem(last=False)
        return allowed
