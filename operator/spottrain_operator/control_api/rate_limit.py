"""How much a source may do: a token bucket for each."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

# Sources that did nothing for longest are forgotten first. Their buckets are full by then.
MAX_SOURCES = 10_000


class RateLimit:
    """Limits what each source may do.

    A source may spend `burst` at once, and `per_second` each second after that.
    """

    def __init__(self, *, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, and when

    def allows(self, source: str) -> bool:
        """Whether the source may pass once now. If so, it has spent 1."""
        allowed = self._left(source) >= 1
        self.spend(source, 1.0 if allowed else 0.0)
        return allowed

    def is_overspent(self, source: str) -> bool:
        """Whether the source has spent more than it may."""
        return self._left(source) < 0

    def spend(self, source: str, cost: float) -> None:
        """Take what the source has cost, even if that is more than is left."""
        self._buckets[source] = (self._left(source) - cost, self._clock())
        self._buckets.move_to_end(source)
        if len(self._buckets) > MAX_SOURCES:
            self._buckets.popitem(last=False)

    def _left(self, source: str) -> float:
        now = self._clock()
        left, at = self._buckets.get(source, (self._burst, now))
        return min(self._burst, left + self._per_second * (now - at))
