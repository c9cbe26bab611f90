"""What can happen to a job with notice.

Each incident happens at the moment that is worst for it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from e2e.rehearsal import INTERVAL, Rehearsal
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.names import FILE_DRAIN

Act = Callable[[Rehearsal, random.Random], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something that happens to a job, by `act`.

    It happens when `num_spot` spot nodes train, and `num_spot + 1` nodes train or are ready.
    """

    title: str
    act: Act
    num_spot: int


def some(count: int, notice_seconds: float) -> Incident:
    """A few spot nodes at once, somewhere between two steps."""

    def act(run: Rehearsal, choose: random.Random) -> None:
        time.sleep(choose.uniform(0.0, 1.0))  # not for something: to hit another moment of the loop each time
        run.preempt(choose.sample(run.wait_for_spot_nodes(count), count), notice_seconds)

    nodes = "one node" if count == 1 else f"{count} nodes at once"
    return Incident(title=f"{nodes}, {notice_seconds:.0f} s of notice", act=act, num_spot=count)


def _host_is_drained(run: Rehearsal, choose: random.Random) -> None:
    """Drain the node of the store's host, for maintenance.

    The host is an on-demand node if there is one.
    """
    host = run.wait_for_members()[0]
    run.kubectl("drain", host.node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=90s")
    run.wait("a generation without the host", lambda: host.pod not in [m.pod for m in run.members()] != [])
    run.kubectl("uncordon", host.node)


def _during_start_up(run: Rehearsal, choose: random.Random) -> None:
    first, second = choose.sample(run.wait_for_spot_nodes(2), 2)
    number = run.generation().number
    run.preempt([first], 30)
    run.wait("the next generation is started", lambda: run.generation().number > number)
    begun = run.generation()
    nodes = [m.node for m in begun.members if m.capacity_type is CapacityType.SPOT]
    run.preempt([second if second in nodes else nodes[-1]], 30)


def _during_a_checkpoint(run: Rehearsal, choose: random.Random) -> None:
    """Every step begins a save, unless one is under way, so that one always is."""
    number = run.generation().number
    run.set_interval("1steps")
    run.wait("the new interval is in force", lambda: run.generation().number > number)
    run.preempt(choose.sample(run.wait_for_spot_nodes(), 1), 30)
    run.set_interval(INTERVAL)


def _during_another_drain(run: Rehearsal, choose: random.Random) -> None:
    first, *others = choose.sample(run.wait_for_spot_nodes(2), 2)
    generation = run.generation()
    pods = [member.pod for member in generation.members]
    directories = [run.run_directory(pod, generation.number) for pod in pods]
    run.preempt([first], 30)
    run.wait("a drain has begun", lambda: any((path / FILE_DRAIN).exists() for path in directories))
    run.preempt(others, 30)


def _all_spot_one_after_the_other(run: Rehearsal, choose: random.Random) -> None:
    for node in run.wait_for_spot_nodes(3):
        run.preempt([node], 30)
        time.sleep(0.3)  # the pace of the cloud


def _cancelled(run: Rehearsal, choose: random.Random) -> None:
    nodes = choose.sample(run.wait_for_spot_nodes(2), 2)
    run.preempt(nodes, 60)
    time.sleep(choose.uniform(0.0, 1.0))  # before, while or after it is acted on
    run.cluster.cancel(nodes)


def _to_the_end(run: Rehearsal, choose: random.Random) -> None:
    """The shortest notice of the large clouds, waited out: the node goes on its own."""
    node = choose.choice(run.wait_for_spot_nodes())
    run.preempt([node], 15)
    run.wait(f"{node} is gone", lambda: node in run.gone(), seconds=30)


SPECIAL = (
    Incident(title="the node of the rendezvous store's host is drained", act=_host_is_drained, num_spot=1),
    Incident(title="one node, then another while the next generation starts", act=_during_start_up, num_spot=2),
    Incident(title="one node during a checkpoint", act=_during_a_checkpoint, num_spot=1),
    Incident(title="one node, then another during its drain", act=_during_another_drain, num_spot=2),
    Incident(title="all spot nodes in quick succession", act=_all_spot_one_after_the_other, num_spot=3),
    Incident(title="two nodes, and the notice is taken back", act=_cancelled, num_spot=2),
    Incident(title="one node, 15 s of notice, to the end", act=_to_the_end, num_spot=1),
)


def incidents(num: int, choose: random.Random) -> list[Incident]:
    """As many incidents as asked for, in random order.

    Up to seven are special ones. The others are preemptions that take one to three nodes at once.
    """
    special = choose.sample(SPECIAL, min(num, len(SPECIAL)))
    others = [some(1 + i % 3, choose.choice((15, 30, 120))) for i in range(num - len(special))]
    return choose.sample([*special, *others], num)
