"""Faults of a cluster in memory: what a test lets happen to requests.

A hook in `before` is awaited before a request takes effect, and one in `after` before its answer is given. Each may
wait, and what it raises is what the request ends with.
"""

from __future__ import annotations

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
class Failing:
    """Lets requests fail while `error` is set.

    Attributes:
        verbs, resource, name: The requests that fail. Empty: any.
        num: How many have failed.
    """

    error: BaseException | None
    verbs: tuple[str, ...] = ()
    resource: Resource | None = None
    name: str = ""
    num: int = 0

    async def __call__(self, request: Request) -> None:
        fits = (
            (not self.verbs or request.verb in self.verbs)
            and self.resource in (None, request.resource)
            and self.name in ("", request.name)
        )
        if fits and self.error is not None:
            self.num += 1
            raise self.error
