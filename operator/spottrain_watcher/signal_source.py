"""The protocol that hides how clouds announce a preemption."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from spottrain_api.contract.notices import Notice


class SignalSource(Protocol):
    """One origin of signals about this node.

    `watch` yields *all* notices that the source announces at present: as soon as it knows them (an empty tuple if
    there are none), and again whenever they change. A notice that is missing from a later tuple has been taken back.
    If the endpoint is absent, slow or sends nonsense, `watch` yields nothing and retries. It never ends, and an
    endpoint never makes it raise.
    """

    @property
    def name(self) -> str: ...

    @property
    def trouble(self) -> str | None:
        """Why the source hears nothing at present, as a sentence; None while its endpoint answers."""
        ...

    @property
    def starting(self) -> bool:
        """Whether the trouble is only that the first answer takes its time.

        It may take no longer than the cloud allows.
        """
        ...

    def watch(self) -> AsyncIterator[tuple[Notice, ...]]: ...
