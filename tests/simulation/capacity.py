"""The simulated cloud with a quota of pods, and what holds of a job's nodes in it at each moment."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.core.facts.demand import demand
from spottrain_operator.core.model import CreatePod, Observed, Plan
from spottrain_operator.core.policies.capacity import may_fall_back
from spottrain_operator.core.timing import DEFAULT_TIMING, Timing
from spottrain_operator.job_record import JobRecord
from spottrain_operator.kube.errors import RefusedError
from spottrain_operator.refusals import note_refusal
from spottrain_simulator.clock import NOT_READY_AFTER, seconds_of
from spottrain_simulator.machines import Pod
from spottrain_simulator.ranks import Pace
from spottrain_simulator.trace import HOUR, Offer, Trace
from spottrain_simulator.traced import Cloud, TracedWorld
from world.jobs import spec_of

SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND
_QUOTA = "pods is forbidden: exceeded quota: compute, requested: pods=1, used: pods={}, limited: pods={}"
# What a scheduler, an agent and the drain of a generation take together, in seconds.
_MOMENT = 60.0
# What changes all the time is recorded with a decision alone: other passes would take most of the time.
_TIMING = replace(DEFAULT_TIMING, record_interval=1000 * HOUR)


@dataclass(slots=True, kw_only=True)
class Stay:
    """A node that a pod of the job has or had, from when to when, as Kubernetes showed it."""

    capacity_type: CapacityType
    pool: str | None
    start: float
    end: float | None = None


@dataclass(kw_only=True)
class WatchedWorld(TracedWorld):
    """A cloud in which a quota may refuse pods, and whose every moment is looked at.

    Attributes:
        quota_at: How many pods the namespace may have at a time.
        stays: The record of nodes, by pod uid.
        problems: What must not be, with its time.
    """

    timing: Timing = _TIMING
    quota_at: Callable[[float], float] = lambda _: float("inf")
    stays: dict[str, Stay] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._record = JobRecord(uid=self.job.uid)
        self._waits_since: tuple[float, int] | None = None
        self._unused_since: dict[str, float] = {}

    @property
    def bill(self) -> float:
        """What the record of nodes comes to, at the job's prices."""
        stays = self.stays.values()
        return sum(self._price(each) * ((each.end or self.time) - each.start) for each in stays) / HOUR

    @property
    def unrecorded(self) -> float:
        """What the nodes that the job holds have cost since the newest record."""
        recorded = self.status.accounted_at
        since = 0.0 if recorded is None else seconds_of(recorded)
        held = (each for each in self.stays.values() if each.end is None)
        return sum(self._price(each) * (self.time - max(since, each.start)) for each in held) / HOUR

    def _price(self, stay: Stay) -> float:
        return self.cloud.price_at(stay.pool or stay.capacity_type.value, 0)

    def story(self) -> str:
        return "\n".join([*self.events[-40:], *self.problems])

    # --- the quota -----------------------------------------------------------------------------------------

    def observe(self, time: float | None = None) -> Observed:
        return replace(super().observe(time), refusal=self._record.refusal)

    def _carry_out(self, observed: Observed, decided: Plan) -> None:
        tried = [action for action in decided.actions if isinstance(action, CreatePod)]
        used, limited = len(self.pods), self.quota_at(self.time)
        error = RefusedError(_QUOTA.format(used, limited))  # what this pass deletes still counts
        free = max(0, int(min(len(tried), limited - used)))
        refused = {action.name for action in tried[free:]}
        kept = (each for each in decided.actions if not (isinstance(each, CreatePod) and each.name in refused))
        super()._carry_out(observed, replace(decided, actions=tuple(kept)))
        errors = {each.capacity_type: error for each in tried if each.name in refused}
        if tried:
            note_refusal(self._record, self.job, {each.capacity_type for each in tried}, errors, self.now)

    # --- the record of nodes -------------------------------------------------------------------------------

    def _run_operator(self) -> None:
        self._keep_stays()
        super()._run_operator()
        if not self.finished:
            self._look_for_a_wait()
            self._look_for_unused_nodes()

    def _keep_stays(self) -> None:
        for pod in self.pods.values():
            if pod.scheduled is not None and pod.uid not in self.stays:
                stay = Stay(capacity_type=pod.capacity_type, pool=pod.pool, start=pod.scheduled)
                self.stays[pod.uid] = stay
        for uid, stay in self.stays.items():
            if stay.end is None and not self._has_node(self.pods.get(uid)):
                stay.end = self.time

    def _has_node(self, pod: Pod | None) -> bool:
        node = self.nodes.get(pod.node or "") if pod is not None and pod.exit_code is None else None
        return node is not None and (node.died_at is None or self.time < node.died_at + NOT_READY_AFTER)

    # --- what must not be ----------------------------------------------------------------------------------

    def _look_for_a_wait(self) -> None:
        """The job has fewer nodes than it may have while the cloud has one, and nothing is taken from it."""
        holds_off = self.status.hold_off is not None and self.status.hold_off.until > self.now
        if self._num_free_nodes() == 0 or holds_off:
            self._waits_since = None
            return
        taken = sum(node.notice is not None or not node.alive for node in self.nodes.values())
        if self._waits_since is None or self._waits_since[1] != self.status.preemptions or taken:
            self._waits_since = self.time, self.status.preemptions
        if self.time - self._waits_since[0] > self.longest_wait:
            self._problem(f"waits since {self._waits_since[0]:.0f} with {self._num_free_nodes()} nodes free")

    def _num_free_nodes(self) -> int:
        """How many more nodes the job may have now, and the cloud has."""
        wanted, running = demand(self.spec), self.status.running
        kinds = [member.capacity_type for member in running.members] if running is not None else []
        lacks = self.spec.nodes.max - len(kinds)
        most = wanted.max_on_demand if may_fall_back(self.spec) else wanted.on_demand
        spot = min(self._offered(SPOT), wanted.spot - kinds.count(SPOT))
        on_demand = min(self._offered(ON_DEMAND), most - kinds.count(ON_DEMAND))
        quota = self.quota_at(self.time) - len(kinds)
        free = max(0, int(min(lacks, max(0, spot) + max(0, on_demand), quota)))
        return free if len(kinds) + free >= self.spec.nodes.min else 0

    def _offered(self, kind: CapacityType) -> float:
        """How many nodes of a type the cloud has beyond those that train."""
        pools = {pool.name for pool in self.spec.capacity.pools if pool.kind is kind} or {kind.value}
        running = self.status.running
        members = [member.capacity_type for member in running.members] if running is not None else []
        return sum(self.cloud.nodes_at(pool, self.time) for pool in pools) - members.count(kind)

    @property
    def longest_wait(self) -> float:
        """Seconds that the operator names for a node to come: each pool is tried, and then a restart is weighed."""
        fallback, timing = self.spec.capacity.fallback, self.timing
        num_pools = max(1, len(self.spec.capacity.pools))
        patience = max(fallback.after_seconds, timing.pool_patience)
        return num_pools * patience + self.cloud.boot_seconds + timing.growth_longest + self.pace.start + _MOMENT

    def _look_for_unused_nodes(self) -> None:
        running = self.status.running
        members = {member.pod_uid for member in running.members} if running is not None else set()
        used = {pod.node for pod in self.pods.values() if pod.uid in members}
        unused = [node.name for node in self.nodes.values() if node.alive and node.name not in used]
        self._unused_since = {name: self._unused_since.get(name, self.time) for name in unused}
        for name, since in self._unused_since.items():
            if self.time - since > self.longest_unused:
                self._problem(f"pays for {name} since {since:.0f}, and doesn't use it")

    @property
    def longest_unused(self) -> float:
        """Seconds that the operator names for a node that doesn't train: it waits for others, or for a restart.

        Each node that comes makes the others wait anew.
        """
        timing = self.timing
        for_a_gang = timing.gang_patience * max(1, self.spec.nodes.min - 1)
        return max(timing.growth_longest, for_a_gang) + self.cloud.boot_seconds + self.pace.start + _MOMENT

    def _problem(self, text: str) -> None:
        if not self.problems:
            self.problems.append(f"{self.time:.0f}: {text}")


def random_world(seed: int, *, hours: float) -> WatchedWorld:
    """A job and a cloud, both drawn by a seed: pools, reclaims, shortages and a quota."""
    rng = random.Random(seed)
    spec = _random_spec(rng)
    spot = [pool.name for pool in spec.capacity.pools if pool.kind is SPOT] or ["spot"]
    prices = {"on-demand": 3.0, "spot": 1.0} | {
        pool.name: pool.price_per_hour for pool in spec.capacity.pools if pool.price_per_hour is not None
    }
    offers = {name: list(_random_offers(rng, spec.nodes.max, hours, prices[name])) for name in spot}
    cloud = Cloud(
        trace=Trace(offers, hours * HOUR),
        prices=prices,
        boot_seconds=rng.choice([30.0, 120.0]),
        notice_seconds=rng.choice([0.0, 30.0, 120.0]),
    )
    pace = Pace(start=rng.choice([10.0, 60.0]), step=10.0, nodes=spec.nodes.max, commit_every=30, wait=0, stall=0)
    quota = _random_quota(rng, spec.nodes.max, hours)
    return WatchedWorld(spec, seed=seed, total_steps=10**6, pace=pace, cloud=cloud, quota_at=quota)


def _random_spec(rng: random.Random) -> TrainingJobSpec:
    most = rng.randint(1, 5)
    capacity: dict[str, Any] = {
        "onDemand": {"min": rng.randint(0, 1), "pricePerHour": 3.0},
        "spot": {"pricePerHour": 1.0},
        "fallback": {"policy": rng.choice(["OnDemand", "None"])},
    }
    if rng.random() < 0.6:
        names = ["a", "b", "c"][: rng.randint(2, 3)]
        spot = [_pool(name, "spot", pricePerHour=rng.choice([0.8, 1.0, 1.5])) for name in names]
        capacity["pools"] = [*spot, _pool("on-demand", "on-demand", pricePerHour=3.0)]
    return spec_of(nodes={"min": rng.randint(1, most), "max": most}, capacity=capacity)


def _pool(name: str, kind: str, **fields: object) -> dict[str, object]:
    return {"name": name, "capacityType": kind, "provider": "eks", **fields}


def _random_offers(rng: random.Random, most: int, hours: float, price: float) -> Iterator[Offer]:
    time = 0.0
    while time < hours * HOUR:
        yield Offer(time=time, nodes=rng.choice([0, most, rng.randint(0, most)]), price=price)
        time += rng.choice([rng.uniform(60, 600), rng.uniform(600, HOUR), rng.uniform(HOUR, 2 * HOUR)])


def _random_quota(rng: random.Random, most: int, hours: float) -> Callable[[float], float]:
    """A quota that changes each hour, and that others often leave free."""
    each_hour = [rng.choice([most, most + 2, rng.randint(1, most)]) for _ in range(int(hours) + 1)]
    return lambda time: each_hour[min(len(each_hour) - 1, int(time // HOUR))]
