"""Whether a namespace's jobs are this operator's to lead."""

from __future__ import annotations

import time
from collections.abc import Callable

from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.resources import NAMESPACES
from spottrain_operator.kube.scope import Scope

# Labels of namespaces hardly ever change.
REMEMBERED_SECONDS = 15.0


class LedNamespaces:
    """Looks up the labels of namespaces, if the scope depends on them."""

    def __init__(self, scope: Scope, cluster: Cluster, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._scope = scope
        self._cluster = cluster
        self._clock = clock
        self._known: dict[str, tuple[float, bool]] = {}

    @property
    def may_change(self) -> bool:
        """Whether a namespace that isn't led now may be led later."""
        return bool(self._scope.labels)

    async def leads(self, name: str) -> bool:
        if not self._scope.labels:
            return self._scope.contains(name, {})
        read_at, led = self._known.get(name, (float("-inf"), False))
        if self._clock() - read_at >= REMEMBERED_SECONDS:
            namespace = await self._cluster.get(NAMESPACES, name)
            labels = (namespace or {}).get("metadata", {}).get("labels") or {}
            led = namespace is not None and self._scope.contains(name, labels)
            self._known[name] = (self._clock(), led)
        return led
