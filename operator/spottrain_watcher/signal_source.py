"""The seam behind which the clouds differ."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from spottrain_api.contract import Notice


class SignalSource(Protocol):
    """One origin of signals about this node.

    `watch` yields *all* that the source announces at present: once when it first knows (with nothing, if there
    is nothing), and again whenever that changes. What is missing from a later set has been taken back. A source
    that can't tell, because its endpoint is absent, slow or talks nonsense, yields nothing and tries again.
    `watch` never ends and never raises on account of its endpoint.
    """

    @property
    def name(self) -> str: ...

    def watch(self) -> AsyncIterator[tuple[Notice, ...]]: ...
