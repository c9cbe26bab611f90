"""What the scheduler says of a pod that has no node."""

from __future__ import annotations

import re

from spottrain_operator.core.model import PodView

# The scheduler goes on with the pods that it could evict, which a reader takes for spot preemptions.
_EVICTIONS = re.compile(r"[.,]?\s*(no new claims to deallocate,\s*)?preemption: .*$", re.DOTALL)


def scheduler_says(pod: PodView) -> str:
    """The scheduler's sentence about `pod`, without its full stop and without what it says of evictions."""
    said = _EVICTIONS.sub("", pod.waiting_message or "").strip().removesuffix(".")
    return said.replace("not found. not found", "not found") or "no node suits it"


def lacks_claim(pod: PodView) -> bool:
    """Whether the pod has no node because a claim of its volumes is missing or unbound. More nodes don't help."""
    return pod.unschedulable_since is not None and "persistentvolumeclaim" in scheduler_says(pod).lower()
