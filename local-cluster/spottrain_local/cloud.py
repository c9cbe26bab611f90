"""The simulated cloud: announces that instances go, takes and restores them.

`Cloud` decides and keeps the state; `Machines` carries it out. A notice is a file (`interruption.json`) that the
node's metadata server shows, and nothing else announces it. At the deadline the machine ends with all that runs on
it. A few seconds later its Node object is deleted, as a cloud controller does.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic.alias_generators import to_camel

from spottrain_local.layout import LocalClusterError, write_atomically
from spottrain_local.metadata.interruption import KINDS_OF_PROVIDER, Action, Interruption, InterruptionKind
from spottrain_local.shapes import new_instance_id
from spottrain_local.spec import NodePool

logger = logging.getLogger(__name__)

# Seconds between the end of an instance and the deletion of its Node object.
FORGET_SECONDS = 3.0
LONGEST_NOTICE_SECONDS = 24 * 3600.0


class Instance(BaseModel):
    """The machine behind a node.

    It is `gone` from its end until `restore`, which starts a fresh one.
    """

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    node: str
    instance_id: str
    gone: bool = False
    interruption: Interruption | None = None

    @property
    def state(self) -> str:
        if self.gone:
            return "gone"
        return self.interruption.kind if self.interruption else "running"


class Machines(Protocol):
    """What the cloud does to machines and to their objects in the cluster."""

    def start(self, instance: Instance) -> None:
        """Start the node process of an instance, and return at once."""

    async def kill(self, node: str) -> None:
        """End a node and all that runs on it, without a warning."""

    def erase(self, node: str) -> None:
        """Empty a node's disk."""

    def announce(self, node: str, interruption: Interruption | None) -> None:
        """Show an interruption, or with None remove it, in the node's metadata."""

    async def forget(self, node: str, *, with_pods: bool) -> None:
        """Delete the Node object and, with `with_pods`, the pods bound to it."""


_INSTANCES = TypeAdapter(list[Instance])


class Cloud:
    """The instances of one cluster.

    A file keeps their state when the supervisor ends.
    """

    def __init__(
        self,
        pools: dict[str, NodePool],
        machines: Machines,
        record: Path,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._pools = pools
        self._machines = machines
        self._record = record
        self._now = now
        self._instances = self._recorded()
        # What happens to a node later: its end at the deadline, or the deletion of its Node object.
        self._pending: dict[str, asyncio.Task[None]] = {}
        # Ends and fresh starts take a moment each, and must not overlap.
        self._changing = asyncio.Lock()

    def instances(self) -> list[Instance]:
        """Return all instances, in the order of the cluster's nodes."""
        return list(self._instances.values())

    def start(self) -> None:
        """Start what should run, and resume what was pending when the supervisor ended."""
        for instance in self.instances():
            instance.gone = instance.gone or self._is_overdue(instance)
            if instance.gone:
                self._later(instance.node, self._forget_after(instance.node, 0))
            else:
                self._machines.announce(instance.node, instance.interruption)
                self._machines.start(instance)
                self._expect_end(instance)
        self._save()

    async def stop(self) -> None:
        """Suspend everything that is pending until the next start."""
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)

    def preempt(
        self,
        nodes: Iterable[str],
        notice_seconds: float,
        kind: InterruptionKind = "preempt",
        action: Action = "terminate",
    ) -> None:
        """Announce that these nodes go, and take them when the notice is over."""
        if not 0 <= notice_seconds <= LONGEST_NOTICE_SECONDS:
            raise LocalClusterError("The notice is not between 0 s and 24 h. Write it like `--notice 30s`.")
        instances = self._existing(nodes)
        for instance in instances:
            self._check_interruptible(instance, kind)
        now = self._now()
        for instance in instances:
            interruption = Interruption(
                id=str(uuid4()),
                kind=kind,
                action=action,
                notice_at=now,
                deadline=now + timedelta(seconds=notice_seconds),
            )
            self._machines.announce(instance.node, interruption)
            instance.interruption = interruption
            self._expect_end(instance)
        self._save()

    def cancel(self, nodes: Iterable[str]) -> None:
        """Take the announcement back: the nodes stay."""
        instances = self._existing(nodes)
        for instance in instances:
            if instance.interruption is None:
                raise LocalClusterError(
                    f"Nothing is announced for the node {instance.node}, so there is nothing to cancel."
                )
        for instance in instances:
            self._drop_pending(instance.node)
            instance.interruption = None
            self._machines.announce(instance.node, None)
        self._save()

    async def kill(self, nodes: Iterable[str]) -> None:
        """End these nodes now, without any notice."""
        async with self._changing:
            instances = self._existing(nodes)
            for instance in instances:
                self._drop_pending(instance.node)
            await asyncio.gather(*(self._end(instance) for instance in instances))

    async def restore(self, nodes: Iterable[str]) -> None:
        """Start fresh instances for nodes that are gone, under the same names.

        Raises:
            LocalClusterError: Some nodes are not gone. Those that are gone were restored.
        """
        async with self._changing:
            instances = self._known(nodes)
            there = [instance for instance in instances if not instance.gone]
            fresh = [instance for instance in instances if instance.gone]
            for instance in fresh:
                await self._restore(instance)
            if there:
                sentences = [_not_gone(instance) for instance in there]
                if fresh:
                    sentences.append(f"Started fresh instances: {', '.join(instance.node for instance in fresh)}.")
                raise LocalClusterError(" ".join(sentences))

    async def _restore(self, instance: Instance) -> None:
        self._drop_pending(instance.node)
        # In a cloud the replacement has a different name, so no pod that is bound to the old node starts on it.
        await self._machines.forget(instance.node, with_pods=True)
        self._machines.erase(instance.node)
        instance.interruption = None
        instance.instance_id = new_instance_id(self._pools[instance.node].provider)
        self._machines.start(instance)
        instance.gone = False
        self._save()

    def _check_interruptible(self, instance: Instance, kind: InterruptionKind) -> None:
        if instance.interruption and instance.interruption.takes_the_machine:
            raise LocalClusterError(
                f"The node {instance.node} is already announced to go at"
                f" {instance.interruption.deadline:%H:%M:%S} UTC: `spottrain local cancel {instance.node}` first."
            )
        pool = self._pools[instance.node]
        if kind not in KINDS_OF_PROVIDER[pool.provider]:
            known = " or ".join(name for name, kinds in KINDS_OF_PROVIDER.items() if kind in kinds)
            raise LocalClusterError(
                f"The node {instance.node} is of {pool.provider}, which announces no {kind}. Use a node with the"
                f" provider {known}, or `--kind {' or '.join(KINDS_OF_PROVIDER[pool.provider])}`."
            )
        if kind != "maintenance" and pool.capacity_type != "spot":
            raise LocalClusterError(
                f"The node {instance.node} is on-demand, and clouds take back only spot nodes. Use"
                f" `spottrain local kill {instance.node}` for a failure, or `kubectl drain {instance.node}"
                " --ignore-daemonsets` for a planned loss."
            )

    def _known(self, nodes: Iterable[str]) -> list[Instance]:
        names = list(dict.fromkeys(nodes))
        if not names:
            raise LocalClusterError("Name at least one node; `spottrain local status` lists them.")
        unknown = [name for name in names if name not in self._instances]
        if unknown:
            raise LocalClusterError(
                f"There is no node {unknown[0]!r} in this cluster. Its nodes are {', '.join(self._instances)}."
            )
        return [self._instances[name] for name in names]

    def _existing(self, nodes: Iterable[str]) -> list[Instance]:
        instances = self._known(nodes)
        for instance in instances:
            if instance.gone:
                raise LocalClusterError(
                    f"The node {instance.node} is gone already; `spottrain local restore {instance.node}` brings"
                    " a fresh one."
                )
        return instances

    def _is_overdue(self, instance: Instance) -> bool:
        """Return whether the deadline passed while no supervisor ran."""
        interruption = instance.interruption
        return bool(interruption and interruption.takes_the_machine and interruption.deadline <= self._now())

    def _expect_end(self, instance: Instance) -> None:
        if instance.interruption and instance.interruption.takes_the_machine:
            self._later(instance.node, self._end_at(instance, instance.interruption.deadline))

    async def _end_at(self, instance: Instance, deadline: datetime) -> None:
        await asyncio.sleep(max(0.0, (deadline - self._now()).total_seconds()))
        async with self._changing:
            del self._pending[instance.node]  # `_end` leaves the next one
            await self._end(instance)

    async def _end(self, instance: Instance) -> None:
        instance.gone = True
        await self._machines.kill(instance.node)
        self._save()
        logger.info("node %s is gone", instance.node)
        self._later(instance.node, self._forget_after(instance.node, FORGET_SECONDS))

    async def _forget_after(self, node: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._machines.forget(node, with_pods=False)

    def _later(self, node: str, work: "asyncio._CoroutineLike[None]") -> None:
        self._drop_pending(node)
        self._pending[node] = asyncio.create_task(work, name=f"cloud: {node}")

    def _drop_pending(self, node: str) -> None:
        task = self._pending.pop(node, None)
        if task:
            task.cancel()

    def _recorded(self) -> dict[str, Instance]:
        """Return the instances of the last run, for the nodes that the cluster has now."""
        known: dict[str, Instance] = {}
        if self._record.exists():
            known = {item.node: item for item in _INSTANCES.validate_json(self._record.read_bytes())}
        return {
            name: known.get(name) or Instance(node=name, instance_id=new_instance_id(pool.provider))
            for name, pool in self._pools.items()
        }

    def _save(self) -> None:
        data = [item.model_dump(mode="json", by_alias=True) for item in self.instances()]
        try:
            write_atomically(self._record, json.dumps(data, indent=1))
        except OSError as error:
            # What happens to the machines counts. The next change writes all of it.
            logger.error("the state of the nodes is not on record: %s", error)


def _not_gone(instance: Instance) -> str:
    interruption = instance.interruption
    if interruption is None or not interruption.takes_the_machine:
        return f"The node {instance.node} is not gone, so there is nothing to restore."
    return (
        f"The node {instance.node} is not gone yet: it goes at {interruption.deadline:%H:%M:%S} UTC. Restore it then,"
        f" or let it stay: `spottrain local cancel {instance.node}`."
    )
