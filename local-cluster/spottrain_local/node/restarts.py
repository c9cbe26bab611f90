"""Whether a container that has ended is restarted, and after how long."""

from dataclasses import dataclass, field

from spottrain_local.node.containers import ContainerKind, Terminated


def restarts(policy: str, kind: ContainerKind, ended: Terminated) -> bool:
    """Return whether the pod's restart policy restarts such a container."""
    if kind == "sidecar":
        return True
    if kind == "init":
        return policy != "Never" and ended.exit_code != 0
    return policy == "Always" or (policy == "OnFailure" and ended.exit_code != 0)


@dataclass(slots=True, kw_only=True)
class Backoff:
    """Delays between restarts.

    There is none before the first restart. Then the delay is `base_seconds`, and doubles up to `max_seconds`.

    A kubelet has 10 s and 300 s. It starts again with the first delay after a container has run for ten minutes;
    here, for 60 times the base.
    """

    base_seconds: float
    max_seconds: float
    _next: float = field(default=0.0, init=False)

    def delay(self, ran_seconds: float) -> float:
        """Return the seconds to wait after a run of `ran_seconds`."""
        if ran_seconds > 60 * self.base_seconds:
            self._next = 0.0
        delay = self._next
        self._next = min(self.max_seconds, 2 * delay or self.base_seconds)
        return delay
