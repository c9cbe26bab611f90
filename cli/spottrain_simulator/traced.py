"""The world whose nodes come and go as a trace says, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from spottrain_api.contract.assignments import CapacityType
from spottrain_simulator.machines import Node
from spottrain_simulator.trace import HOUR, Trace
from spottrain_simulator.world import World

PoolKey = tuple[CapacityType, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """What a cloud offers, and how it gives and takes.

    Attributes:
        trace: The pools' nodes and prices.
        prices: Of a node per hour in the pools that the trace leaves out. Of these there is no shortage.
        boot_seconds: From the request of a node until pods can be placed on it. It is paid for from the start.
        notice_seconds: From the notice to the end of a node that the cloud takes. 0: it takes nodes without one.
    """

    trace: Trace
    prices: Mapping[str, float] = field(default_factory=dict)
    boot_seconds: float = 120.0
    notice_seconds: float = 120.0

    def nodes_at(self, pool: str, time: float) -> float:
        return self.trace.at(pool, time).nodes if pool in self.trace.offers else float("inf")

    def price_at(self, pool: str, time: float) -> float:
        return self.trace.at(pool, time).price if pool in self.trace.offers else self.prices[pool]

    def cost(self, pool: str, start: float, end: float) -> float:
        if pool in self.trace.offers:
            return self.trace.cost(pool, start, end)
        return self.prices[pool] * (end - start) / HOUR


def name_of(key: PoolKey) -> str:
    """The pool's name in a trace. A job without pools has one of each capacity type."""
    capacity_type, pool = key
    return pool if pool is not None else capacity_type.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A node that was paid for, from when to when."""

    capacity_type: CapacityType
    pool: str
    start: float
    end: float

    @property
    def hours(self) -> float:
        return (self.end - self.start) / HOUR


@dataclass(kw_only=True)
class TracedWorld(World):
    """A world in which an autoscaler asks the cloud for a node for each pod that waits, and gives it back after.

    Attributes:
        held: The nodes that were given back.
    """

    cloud: Cloud
    held: list[Held] = field(default_factory=list)
    _since: dict[str, float] = field(default_factory=dict)
    _boots: list[tuple[float, PoolKey]] = field(default_factory=list)

    @property
    def cost(self) -> float:
        """What all nodes have cost so far."""
        return sum(self.cloud.cost(each.pool, each.start, each.end) for each in self.all_held())

    def all_held(self) -> Iterator[Held]:
        """The nodes that were held so far, or still are."""
        yield from self.held
        for name, since in self._since.items():
            yield self._held(self.nodes[name], since)

    def _held(self, node: Node, since: float) -> Held:
        pool = name_of((node.capacity_type, node.pool))
        return Held(capacity_type=node.capacity_type, pool=pool, start=since, end=self.time)

    def _moments(self) -> Iterator[float]:
        yield from super()._moments()
        yield self.cloud.trace.next_change(self.time)
        yield from (ready for ready, _ in self._boots)

    def _move_nodes(self) -> None:
        super()._move_nodes()
        for key in {(node.capacity_type, node.pool) for node in self.nodes.values()}:
            self._take_back(key)
        self._finish_boots()
        self._give_back()
        for key in {(pod.capacity_type, pod.pool) for pod in self.pods.values() if pod.node is None}:
            self._ask(key)

    def kill(self, node: Node) -> None:
        super().kill(node)
        self._close(node)

    def _close(self, node: Node) -> None:
        if node.name in self._since:
            self.held.append(self._held(node, self._since.pop(node.name)))

    def _running(self, key: PoolKey) -> list[Node]:
        """The pool's nodes that the cloud doesn't take yet."""
        nodes = (node for node in self.nodes.values() if (node.capacity_type, node.pool) == key)
        return [node for node in nodes if node.alive and node.notice is None]

    def _take_back(self, key: PoolKey) -> None:
        """The cloud takes nodes, at random, if it has fewer than the job holds."""
        nodes, most = self._running(key), self.cloud.nodes_at(name_of(key), self.time)
        if len(nodes) > most:
            for node in self.rng.sample(nodes, len(nodes) - int(most)):
                if self.cloud.notice_seconds > 0:
                    self.preempt(node, self.cloud.notice_seconds)
                else:
                    self.kill(node)

    def _ask(self, key: PoolKey) -> None:
        """Ask for a node for each pod that waits for one, if the cloud has it."""
        waiting = sum(
            pod.unschedulable_since is not None and pod.node is None and (pod.capacity_type, pod.pool) == key
            for pod in self.pods.values()
        )
        booting = sum(each == key for _, each in self._boots)
        most = self.cloud.nodes_at(name_of(key), self.time) - len(self._running(key)) - booting
        for _ in range(int(min(most, waiting - booting))):
            self._boots.append((self.time + self.cloud.boot_seconds, key))

    def _finish_boots(self) -> None:
        for ready, key in list(self._boots):
            if ready > self.time:
                continue
            self._boots.remove((ready, key))
            if len(self._running(key)) < self.cloud.nodes_at(name_of(key), self.time):
                node = self.add_node(*key)
                self._since[node.name] = ready - self.cloud.boot_seconds

    def _give_back(self) -> None:
        """Give back nodes without a pod, unless one waits for them."""
        used = {pod.node for pod in self.pods.values()}
        waiting = {(pod.capacity_type, pod.pool) for pod in self.pods.values() if pod.node is None}
        for node in list(self.nodes.values()):
            if node.alive and node.name not in used and (node.capacity_type, node.pool) not in waiting:
                self._close(node)
                self.remove(node)
