"""Index of the jobs that hold nodes, by namespace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from spottrain_operator.core.model import Holder, JobView, PodView
from spottrain_operator.kube.identities import JobKey


class NodeHolders:
    """How many nodes each job's pods hold. Each pass over a job updates it."""

    def __init__(self) -> None:
        self._held: defaultdict[str, dict[str, int]] = defaultdict(dict)

    def note(self, job: JobView, pods: Sequence[PodView]) -> None:
        """Update a job, with its pods as they were read last."""
        held = sum(pod.node is not None and pod.phase in ("Pending", "Running") for pod in pods)
        self._held[job.namespace].pop(job.name, None)
        if held:
            self._held[job.namespace][job.name] = held

    def forget(self, key: JobKey) -> None:
        """Drop a job that is gone."""
        self._held[key.namespace].pop(key.name, None)

    def others(self, job: JobView) -> tuple[Holder, ...]:
        """The other jobs of the namespace that hold nodes, those with most nodes first."""
        held = ((name, number) for name, number in self._held[job.namespace].items() if name != job.name)
        ordered = sorted(held, key=lambda each: (-each[1], each[0]))
        return tuple(Holder(name=name, num_nodes=number) for name, number in ordered)
