"""Leader election: one at a time, soon another, and none that hangs on."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import selectors
from collections.abc import Coroutine
from typing import Any

import pytest

from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.lease import LeaderElection, LeaseSettings
from spottrain_operator.kube.resources import LEASES
from world.cluster import MemoryCluster
from world.faults import WRITES, Fault, Request


def settings(identity: str) -> LeaseSettings:
    return LeaseSettings(
        namespace="system", identity=identity, duration_seconds=15, renew_deadline_seconds=10, retry_seconds=0.001
    )


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


DOWN = Fault(error=ClusterError("connection refused"), verbs=("get",))


def election(cluster: MemoryCluster, identity: str, clock: Clock) -> LeaderElection:
    return LeaderElection(cluster, settings(identity), clock=clock)


def holder(cluster: MemoryCluster) -> Any:
    return cluster.leases["system", "spottrain-operator"]["spec"]["holderIdentity"]


async def pending(task: asyncio.Task[Any]) -> bool:
    """Whether it still waits after a number of tries."""
    done, _ = await asyncio.wait({task}, timeout=0.05)
    return not done


async def take_lease(cluster: MemoryCluster, name: str) -> None:
    """Write another holder into the lease, as one does that thinks it has run out."""
    lease = await cluster.get(LEASES, "spottrain-operator", namespace="system")
    assert lease is not None
    lease["spec"]["holderIdentity"] = name
    await cluster.replace(LEASES, lease)


async def test_the_second_waits_until_the_first_has_been_silent_for_the_duration() -> None:
    cluster, clock = MemoryCluster(), Clock()
    await election(cluster, "a", clock).acquire()
    second = asyncio.create_task(election(cluster, "b", clock).acquire())
    assert await pending(second)
    clock.seconds = 14.9
    assert await pending(second)
    clock.seconds = 15.1
    await asyncio.wait_for(second, 5)
    assert holder(cluster) == "b"


async def test_who_waits_could_take_over_as_long_as_the_api_server_answers() -> None:
    cluster, clock = MemoryCluster(), Clock()
    first, second = election(cluster, "a", clock), election(cluster, "b", clock)
    await first.acquire()
    assert not first.is_standby
    assert not second.is_standby
    waiting = asyncio.create_task(second.acquire())
    assert await pending(waiting)
    assert second.is_standby
    cluster.before.append(DOWN)
    assert await pending(waiting)
    assert not second.is_standby
    cluster.before.clear()
    assert await pending(waiting)
    assert second.is_standby
    await first.release()
    await asyncio.wait_for(waiting, 5)
    assert not second.is_standby


async def test_a_renewing_leader_keeps_it() -> None:
    cluster, clock = MemoryCluster(), Clock()
    first = election(cluster, "a", clock)
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    second = asyncio.create_task(election(cluster, "b", clock).acquire())
    for _ in range(5):
        assert await pending(second)
        clock.seconds += 8.0
    assert not holding.done()
    for task in (holding, second):
        task.cancel()


async def test_a_restarted_container_of_the_same_pod_leads_at_once() -> None:
    cluster, clock = MemoryCluster(), Clock()
    await election(cluster, "pod-x", clock).acquire()
    await asyncio.wait_for(election(cluster, "pod-x", clock).acquire(), 0.5)
    assert cluster.leases["system", "spottrain-operator"]["spec"]["leaseTransitions"] == 0


async def test_a_released_lease_is_free_at_once() -> None:
    cluster, clock = MemoryCluster(), Clock()
    first = election(cluster, "a", clock)
    await first.acquire()
    await first.release()
    await asyncio.wait_for(election(cluster, "b", clock).acquire(), 0.5)
    assert cluster.leases["system", "spottrain-operator"]["spec"]["leaseTransitions"] == 1


async def test_who_leaves_takes_no_lease_from_the_next_one() -> None:
    cluster, clock = MemoryCluster(), Clock()
    first = election(cluster, "a", clock)
    await first.acquire()
    await take_lease(cluster, "b")
    await first.release()
    assert holder(cluster) == "b"


async def test_who_leaves_while_the_api_server_is_down_leads_no_more() -> None:
    cluster, clock = MemoryCluster(), Clock()
    first = election(cluster, "a", clock)
    await first.acquire()
    cluster.before.append(DOWN)
    await first.release()
    assert not first.is_leader
    assert holder(cluster) == "a", "the next one waits until it has run out"


async def test_a_leader_that_cannot_renew_gives_up_before_others_may_take_over() -> None:
    cluster, clock = MemoryCluster(), Clock()
    first = election(cluster, "a", clock)
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    cluster.before.append(DOWN)
    clock.seconds = 9.9
    assert await pending(holding)
    assert first.is_leader
    clock.seconds = 10.1
    await asyncio.wait_for(holding, 5)
    assert not first.is_leader


async def test_a_leader_that_gets_no_answer_gives_up_as_soon() -> None:
    cluster, clock = MemoryCluster(), Clock()
    first = election(cluster, "a", clock)
    await first.acquire()
    cluster.before.append(Fault(verbs=("get",), answers=asyncio.Event()))
    clock.seconds = 9.99
    holding = asyncio.create_task(first.hold())
    assert await pending(holding)
    assert first.is_leader
    clock.seconds = 10.1
    await asyncio.wait_for(holding, 5)
    assert not first.is_leader


async def test_one_request_that_hangs_costs_no_lease() -> None:
    cluster = MemoryCluster()
    short = LeaseSettings(namespace="system", identity="a", renew_deadline_seconds=3.0, retry_seconds=0.001)
    first = LeaderElection(cluster, short)
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    dead = Fault(verbs=("get",), answers=asyncio.Event())
    cluster.before.append(dead)
    while not dead.num:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    cluster.before.clear()
    before = copy.deepcopy(cluster.leases)
    while cluster.leases == before and not holding.done():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert not holding.done()
    assert first.is_leader
    holding.cancel()


class Skipping(selectors.SelectSelector):
    """Lets the time for which a loop would wait pass at once."""

    seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.seconds += timeout or 0.0
        return super().select(0)


class SkippingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skipping = Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.seconds


def skipping(test: Coroutine[None, None, None]) -> None:
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(test)


class Slow(MemoryCluster):
    """Takes some seconds for each answer about leases."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.asked_to_write_at = 0.0
        self.before.append(self._takes_time)

    async def _takes_time(self, request: Request) -> None:
        if request.verb in WRITES:
            self.asked_to_write_at = asyncio.get_running_loop().time()
        await asyncio.sleep(self.seconds)


def test_an_api_server_that_is_slow_costs_no_lease() -> None:
    async def leads() -> None:
        cluster = Slow(1.9)
        lease = LeaseSettings(namespace="system", identity="a")
        first = LeaderElection(cluster, lease, clock=asyncio.get_running_loop().time)
        async with asyncio.timeout(600):
            await first.acquire()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(600):
                await first.hold()
        assert first.is_leader

    skipping(leads())


def test_a_leader_gives_up_by_the_time_at_which_it_sent_its_last_renewal() -> None:
    async def gives_up() -> None:
        cluster, loop = Slow(1.5), asyncio.get_running_loop()
        lease = LeaseSettings(namespace="system", identity="a")
        first = LeaderElection(cluster, lease, clock=loop.time)
        await first.acquire()
        acquired = cluster.asked_to_write_at
        holding = asyncio.create_task(first.hold())
        while cluster.asked_to_write_at == acquired:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        renewed = cluster.asked_to_write_at
        await asyncio.sleep(cluster.seconds)
        cluster.seconds = 3600.0
        await holding
        assert loop.time() == pytest.approx(renewed + lease.renew_deadline_seconds)

    skipping(gives_up())


async def test_a_leader_leads_on_once_the_api_server_is_back() -> None:
    cluster, clock = MemoryCluster(), Clock()
    first = election(cluster, "a", clock)
    await first.acquire()
    cluster.before.append(DOWN)
    clock.seconds = 600.0
    await asyncio.wait_for(first.hold(), 5)
    assert not first.is_leader
    regaining = asyncio.create_task(first.regain())
    await asyncio.sleep(0.01)
    assert not regaining.done()
    cluster.before.clear()
    assert await asyncio.wait_for(regaining, 5)
    assert first.is_leader
    assert cluster.leases["system", "spottrain-operator"]["spec"]["leaseTransitions"] == 0


async def test_a_leader_that_asks_whether_it_leads_on_does_not_lead_meanwhile() -> None:
    cluster, clock = MemoryCluster(), Clock()
    first = election(cluster, "a", clock)
    await first.acquire()
    cluster.before.append(DOWN)
    regaining = asyncio.create_task(first.regain())
    assert await pending(regaining)
    assert not first.is_leader
    cluster.before.clear()
    assert await asyncio.wait_for(regaining, 5)
    assert first.is_leader


@pytest.mark.parametrize("holder", ["b", ""], ids=["another leads", "another has led"])
async def test_a_leader_whose_lease_another_has_held_leads_no_more(holder: str) -> None:
    cluster, clock = MemoryCluster(), Clock()
    first = election(cluster, "a", clock)
    await first.acquire()
    cluster.before.append(DOWN)
    clock.seconds = 600.0
    await asyncio.wait_for(first.hold(), 5)
    cluster.before.clear()
    await take_lease(cluster, holder)
    assert not await asyncio.wait_for(first.regain(), 5)
    assert not first.is_leader


async def test_a_leader_notices_that_the_clusters_state_has_gone_back(caplog: pytest.LogCaptureFixture) -> None:
    """Its own lease of an earlier time is there, as in a backup of etcd."""
    cluster, clock = MemoryCluster(), Clock()
    first = election(cluster, "a", clock)
    await first.acquire()
    backup = copy.deepcopy(cluster.leases)
    holding = asyncio.create_task(first.hold())
    while cluster.leases == backup:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    cluster.leases.update(backup)
    await asyncio.wait_for(holding, 5)
    assert not first.is_leader
    assert not await asyncio.wait_for(first.regain(), 5)
    assert "as after a restore of etcd from a backup" in caplog.text
    # The process that follows takes the lease as it is.
    await asyncio.wait_for(election(cluster, "a", clock).acquire(), 5)


async def test_a_leader_whose_lease_was_taken_gives_up_at_once() -> None:
    cluster, clock = MemoryCluster(), Clock()
    first = election(cluster, "a", clock)
    await first.acquire()
    await take_lease(cluster, "b")
    await asyncio.wait_for(first.hold(), 5)
    assert not first.is_leader


class SlowList(MemoryCluster):
    """Its list of leases takes so long that another process takes over meanwhile."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self.is_slow = False
        self.before.append(self._takes_time)

    async def _takes_time(self, request: Request) -> None:
        if self.is_slow and request.verb == "list":
            self.is_slow = False
            self._clock.seconds += 16.0
            await take_lease(self, "b")


async def test_who_acquires_a_lease_that_runs_out_meanwhile_does_not_lead() -> None:
    clock = Clock()
    cluster = SlowList(clock)
    cluster.is_slow = True
    first = election(cluster, "a", clock)
    acquiring = asyncio.create_task(first.acquire())
    assert await pending(acquiring)
    assert (first.is_leader, first.is_standby, holder(cluster)) == (False, True, "b")
    acquiring.cancel()


async def test_who_regains_a_lease_that_runs_out_meanwhile_does_not_lead() -> None:
    clock = Clock()
    cluster = SlowList(clock)
    first = election(cluster, "a", clock)
    await first.acquire()
    cluster.is_slow = True
    assert not await asyncio.wait_for(first.regain(), 5)
    assert holder(cluster) == "b"


@pytest.mark.parametrize("num_candidates", [2, 8])
async def test_of_many_candidates_exactly_one_leads(num_candidates: int) -> None:
    cluster, clock = MemoryCluster(), Clock()
    candidates = [election(cluster, f"c{n}", clock) for n in range(num_candidates)]
    tasks = [asyncio.create_task(candidate.acquire()) for candidate in candidates]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert sum(candidate.is_leader for candidate in candidates) == 1
    for task in tasks:
        task.cancel()
