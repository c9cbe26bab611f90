"""Faults of a cluster in memory: what a test lets happen to requests.

A hook in `before` is awaited before a request takes effect, and one in `after` before its answer is given. Each may
wait, and what it raises is what the request ends with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from spottrain_operator.kube.resources import Manifest, Resource


class Request(NamedTuple):
    """A request to the cluster.

    Attributes:
        verb: The method of the protocol. A watch asks again and again.
        name: That of the object. Empty: it is about many.
        body: What is to be written. A hook may change it, as a webhook does.
    """

    verb: str
    resource: Resource
    name: str
    body: Manifest | None


WRITES = ("create", "patch", "replace", "delete")
Hook = Callable[[Request], Awaitable[None]]


@dataclass(kw_only=True)
class Fault:
    """Lets requests wait, fail, or both.

    Attributes:
        verbs, resource, name: The requests that it meets. Empty: any.
        answers: They wait until it is set. None: they don't.
        error: They end with it. None: with what they would end with anyway.
        num: How many it has met.
        num_waiting: How many of them wait.
    """

    verbs: tuple[str, ...] = ()
    resource: Resource | None = None
    name: str = ""
    answers: asyncio.Event | None = None
    error: BaseException | None = None
    num: int = 0
    num_waiting: int = 0

    def release(self) -> None:
        """Answer what waits, and let nothing wait any longer."""
        if self.answers is not None:
            self.answers.set()

    async def __call__(self, request: Request) -> None:
        if (
            (self.verbs and request.verb not in self.verbs)
            or self.resource not in (None, request.resource)
            or self.name not in ("", request.name)
        ):
            return
        self.num += 1
        if self.answers is not None:
            self.num_waiting += 1
            try:
                await self.answers.wait()
            finally:
                self.num_waiting -= 1
        if self.error is not None:
            raise self.error
