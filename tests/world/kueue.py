"""Kueue in memory: one queue with a quota of nodes, and what the operator relies on of its behaviour.

An evicted Workload keeps its quota until its job has cleared it. tests/queue has the real Kueue.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spottrain_operator.kube.resources import Manifest
from world.cluster import MemoryCluster

AT = "2026-01-01T00:00:00Z"


@dataclass
class MemoryKueue:
    """Admits Workloads in the order of their priority, and evicts those of lower priority for them."""

    cluster: MemoryCluster
    quota: int

    def work(self) -> None:
        """Look at all Workloads once."""
        for workload in sorted(self._open(), key=lambda each: -each["spec"]["priority"]):
            if is_true(workload, "QuotaReserved"):
                continue
            lacks = nodes_of(workload) - (self.quota - self.used())
            if lacks <= 0:
                say(workload, QuotaReserved=("True", ""), Admitted=("True", ""), Evicted=("False", ""))
                continue
            said = f"insufficient quota, {lacks} more needed"
            say(workload, QuotaReserved=("False", said))
            self._preempt(lacks, below=workload["spec"]["priority"])

    def used(self) -> int:
        """Nodes that are counted."""
        return sum(nodes_of(each) for each in self._open() if is_true(each, "QuotaReserved"))

    def _open(self) -> Iterator[Manifest]:
        return (each for each in self.cluster.workloads.values() if not is_true(each, "Finished"))

    def _preempt(self, lacks: int, *, below: int) -> None:
        held = [each for each in self._open() if is_true(each, "QuotaReserved") and each["spec"]["priority"] < below]
        if sum(map(nodes_of, held)) < lacks:
            return
        for each in sorted(held, key=lambda each: (not is_true(each, "Evicted"), each["spec"]["priority"])):
            if lacks > 0:
                self.evict(each)
                lacks -= nodes_of(each)

    def evict(self, workload: Manifest) -> None:
        say(workload, Evicted=("True", "Preempted to accommodate a workload of higher priority"))


def nodes_of(workload: Manifest) -> int:
    return sum(int(each["count"]) for each in workload["spec"]["podSets"])


def is_true(workload: Manifest, kind: str) -> bool:
    conditions = workload.get("status", {}).get("conditions", ())
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)


def say(workload: Manifest, **conditions: tuple[str, str]) -> None:
    """Set conditions, each with its status and message."""
    known = {each["type"]: each for each in workload.setdefault("status", {}).get("conditions", ())}
    for kind, (status, message) in conditions.items():
        reason = "Preempted" if kind == "Evicted" else "Pending" if status == "False" else kind
        new = {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": AT}
        if kind in known or status == "True" or kind == "QuotaReserved":
            known[kind] = new
    workload["status"]["conditions"] = list(known.values())
