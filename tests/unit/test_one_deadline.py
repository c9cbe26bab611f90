"""One deadline a node, from the signals to the ranks.

It doesn't matter which source speaks first, or who takes a notice back. The watcher's ledger, the agent's states and
the operator's decision are the real ones. Only the wire is left out.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scene import NOW, notice, training_job
from spottrain_agent.agent_state import (
    AgentState,
    CancelDrain,
    DrainSeen,
    NoticesChanged,
    RequestDrain,
    SigtermReceived,
    transition,
)
from spottrain_api.contract.assignments import AgentPhase
from spottrain_api.contract.names import TAINT_PREEMPTION
from spottrain_api.contract.notices import Notice, NoticeKind
from spottrain_watcher.kubernetes_signals import node_notices, pod_notices
from spottrain_watcher.ledger import Ledger

START = datetime(2026, 1, 1, tzinfo=UTC)
TRAINING = AgentState(generation=1, phase=AgentPhase.RUNNING, has_processes=True)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def cloud(seconds: float, id_: str = "ec2-terminate") -> Notice:
    return Notice(id=id_, node="n4", source="ec2", deadline=at(seconds), observed_at=START)


def kubernetes(seconds: float) -> Notice:
    """A taint that leaves 120 s; its time means that the node goes after `seconds`."""
    added = at(seconds - 120).isoformat()
    taint = {"key": "karpenter.sh/disrupted", "effect": "NoSchedule", "timeAdded": added}
    [found] = node_notices("n4", {"n4": {"metadata": {"name": "n4"}, "spec": {"taints": [taint]}}}, START)
    return found


class Node:
    """The watcher of a node and the agent of a pod on it."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.state = TRAINING
        self.commands: list[Any] = []

    def announces(self, source: str, *notices: Notice, second: float = 0) -> None:
        self.ledger = self.ledger.observe(source, notices, at(second))
        event = NoticesChanged(notices=self.ledger.notice_list().notices, now=at(second))
        self.receives(event)

    def receives(self, event: Any) -> None:
        step = transition(self.state, event)
        self.state = step.state
        self.commands += step.commands

    @property
    def deadline(self) -> float | None:
        drain = self.state.drain
        return (drain.deadline - START).total_seconds() if drain is not None else None


@pytest.mark.parametrize("order", list(permutations(["ec2", "taint", "sigterm"])), ids="-".join)
def test_the_earliest_deadline_counts_in_any_order(order: tuple[str, ...]) -> None:
    node = Node()
    for source in order:
        if source == "sigterm":
            node.receives(
                SigtermReceived(notice=cloud(15, "sigterm-u4").model_copy(update={"kind": NoticeKind.EVICT}))
            )
        else:
            node.announces(source, cloud(120) if source == "ec2" else kubernetes(60))
    assert node.deadline == 15
    deadlines = [command.request.deadline for command in node.commands if isinstance(command, RequestDrain)]
    assert deadlines == sorted(deadlines, reverse=True), "it only comes nearer"
    assert len(set(deadlines)) == len(deadlines), "and nothing is reported twice"


@pytest.mark.parametrize(("first", "second"), [(120, 60), (60, 120)], ids=["ec2 later", "ec2 earlier"])
@pytest.mark.parametrize("cancels", ["ec2", "kubernetes"])
def test_a_source_takes_back_its_own_notice_alone(first: float, second: float, cancels: str) -> None:
    node = Node()
    node.announces("ec2", cloud(first))
    node.announces("kubernetes", kubernetes(second))
    node.announces(cancels, second=1)
    assert node.deadline == 60
    assert not [command for command in node.commands if isinstance(command, CancelDrain)]
    assert node.ledger.for_node() is not None, "the node stays marked"
    node.announces("kubernetes" if cancels == "ec2" else "ec2", second=2)
    assert node.deadline is None
    assert isinstance(node.commands[-1], CancelDrain)
    assert node.ledger.for_node() is None


def test_a_source_that_repeats_another_ones_notice_holds_it() -> None:
    """Two sources may pass on the same event.

    For example, node termination handlers read the metadata service, too.
    """
    node = Node()
    node.announces("ec2", cloud(120))
    node.announces("kubernetes", cloud(100))
    node.announces("ec2", second=1)
    assert node.deadline == 100
    assert [each.cancelled for each in node.ledger.notice_list().notices] == [False]


def test_a_drain_that_the_ranks_act_on_is_not_taken_back() -> None:
    node = Node()
    node.announces("ec2", cloud(120))
    node.receives(DrainSeen(generation=1))
    node.announces("ec2", second=1)
    assert node.deadline == 120


def test_an_eviction_of_another_pod_is_not_the_nodes_deadline() -> None:
    since = {"lastTransitionTime": START.isoformat()}
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"} | since
    pod = {"metadata": {"name": "p", "uid": "other"}, "spec": {}, "status": {"conditions": [condition]}}
    ledger = Ledger().observe("kubernetes", tuple(pod_notices("n4", {}, {"p": pod}, START)), START)
    assert ledger.for_node() is None


signals = st.lists(
    st.tuples(
        st.sampled_from(["ec2", "kubernetes"]),
        st.lists(st.integers(10, 300), max_size=2, unique=True),
        st.sampled_from([NoticeKind.PREEMPT, NoticeKind.REBALANCE]),
    ),
    max_size=10,
)


@given(signals)
def test_it_drains_exactly_while_a_notice_stands_and_never_later(history: list[Any]) -> None:
    node = Node()
    earliest: float | None = None
    for second, (source, leads, kind) in enumerate(history):
        notices = tuple(cloud(lead, f"{source}-{kind}-{lead}").model_copy(update={"kind": kind}) for lead in leads)
        node.announces(source, *notices, second=second)
        standing = [n for n in node.ledger.standing() if n.makes_drain]
        if not standing:
            earliest = None
        else:
            first = min((n.deadline - START).total_seconds() for n in standing)
            earliest = first if earliest is None else min(earliest, first)
        assert node.deadline == earliest


def test_the_operator_takes_the_earliest_of_agent_node_and_pod() -> None:
    scene = (
        training_job()
        .says(4, notices=(notice(4, lead=60),))
        .node(4, notice=notice(4, lead=120, id="annotated", source="taint:karpenter.sh/disrupted"))
        .pod(4, deleting=True, deletion_deadline=NOW + timedelta(seconds=20))
    )
    generation = scene.plan().status.generation
    assert generation is not None
    assert generation.deadline == NOW + timedelta(seconds=20)


def test_the_operator_does_not_take_a_notice_back_with_anothers() -> None:
    cancelled = notice(4, lead=60, id="a", cancelled=True)
    scene = training_job().says(4, notices=(cancelled, notice(4, lead=120, id="b", source="taint:x")))
    generation = scene.plan().status.generation
    assert generation is not None
    assert (generation.reason, generation.deadline) == ("Preempted", NOW + timedelta(seconds=120))


def test_the_nodes_taint_means_nothing_once_its_agent_says_that_the_notice_is_taken_back() -> None:
    """The watcher takes the annotation and the taint from the node a moment later."""
    node = {"notice": notice(4, lead=60), "taints": (TAINT_PREEMPTION,)}
    scene = training_job().says(4, notices=(notice(4, lead=60),)).node(4, **node).decided()
    generation = scene.observed.job.status.generation
    assert generation is not None
    assert generation.deadline == NOW + timedelta(seconds=60)
    scene = scene.says(4, notices=(notice(4, lead=60, cancelled=True),))
    assert scene.plan().status.generation == generation, "the drain keeps its deadline"
    undrained = training_job().says(4, notices=(notice(4, lead=60, cancelled=True),)).node(4, **node)
    assert undrained.plan().status.generation == undrained.observed.job.status.generation
