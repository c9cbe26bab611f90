"""Preemptions of a running job on a local cluster.

With notice, no step is lost. Without notice, no committed step is lost.

SPOTTRAIN_PREEMPTIONS=20 rehearses twenty preemptions, among them all special ones, instead of three special ones.
tests/draws.py says how to repeat a run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from e2e.preemption_incidents import incidents
from e2e.rehearsal import Rehearsal, kill, rehearsal
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.names import outcome_file
from spottrain_api.contract.reports import Outcome, OutcomeKind
from spottrain_local.cluster import Cluster
from spottrain_local.layout import checkout_root

NUM_PREEMPTIONS = int(os.environ.get("SPOTTRAIN_PREEMPTIONS", "3"))

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120 + 60 * NUM_PREEMPTIONS)]


@pytest.mark.parametrize("strategy", ["ddp"])
def test_no_step_is_redone_after_preemptions_with_notice(
    operator_cluster: Cluster, draw: random.Random, tmp_path: Path, strategy: str
) -> None:
    with rehearsal(operator_cluster, f"notice-{strategy}", tmp_path, members=1, strategy=strategy) as run:
        for incident in incidents(NUM_PREEMPTIONS, draw):
            run.wait_for_spot(incident.num_spot, ready=incident.num_spot + 1)
            with run.incident(incident.title):
                incident.act(run, draw)
            run.bring_back()
        status = run.finish()
    assert [item.row() for item in run.evidence if item.redone] == []
    assert status.failures == 0
    assert status.steps_redone == 0


@pytest.mark.nightly
@pytest.mark.parametrize(("strategy", "provider", "source"), [("fsdp", "gke", "gce"), ("deepspeed", "aks", "azure")])
def test_shards_lose_no_step_either(
    operator_cluster: Cluster, tmp_path: Path, strategy: str, provider: str, source: str
) -> None:
    """The notice comes through the metadata server of another cloud each time."""
    pools = [
        {"name": "base", "provider": "eks", "capacityType": "on-demand"},
        {"name": "taken", "provider": provider, "capacityType": "spot"},
        {"name": "kept", "provider": "eks", "capacityType": "spot"},
    ]
    capacity = {"onDemand": {"min": 1, "max": 1}, "spot": {"max": 2}, "pools": pools}
    name, taken = f"shards-{strategy}", f"{provider}-spot-0"
    with rehearsal(operator_cluster, name, tmp_path, members=2, strategy=strategy, capacity=capacity) as run:
        run.wait(f"{taken} trains, and two others are ready", lambda: taken in run.spot_nodes())
        run.wait_for_spot(1, ready=3)
        with run.incident(f"{strategy}: one node of {provider}, 30 s of notice"):
            run.preempt([taken], 30)
        told = [message for _, _, message in run.events()]
        status = run.finish()
    assert (status.preemptions, status.failures, status.steps_redone) == (1, 0, 0)
    assert run.evidence[-1].redone == 0
    assert [message for message in told if f"node {taken} goes at" in message and f"notice from {source}" in message]


@pytest.mark.nightly
def test_nodes_with_several_ranks_lose_no_step_either(operator_cluster: Cluster, tmp_path: Path) -> None:
    """Nodes with two ranks each lose no step, in the example with hybrid shards.

    Each node holds the whole state, shared out over its ranks.
    """
    example = yaml.safe_load((checkout_root() / "examples" / "gpt" / "hybrid.yaml").read_text())["spec"]
    several = {key: example[key] for key in ("processesPerNode", "nodes", "capacity", "strategy", "fsdp", "batch")}
    num_nodes, num_local = several["nodes"]["max"], several["processesPerNode"]
    with rehearsal(operator_cluster, "hybrid", tmp_path, members=num_nodes, **several) as run:
        with run.incident("hybrid shards, two ranks a node: one node, 30 s of notice"):
            run.preempt(run.wait_for_spot_nodes()[:1], 30)
        status = run.finish()
    incident = run.evidence[-1]
    assert incident.world_before == num_nodes * num_local
    # The cluster has a node to spare: its pod may be warm before the next generation starts.
    assert incident.world_after in ((num_nodes - 1) * num_local, num_nodes * num_local)
    assert incident.redone == 0
    assert (status.preemptions, status.failures, status.steps_redone) == (1, 0, 0)


@pytest.mark.nightly
def test_a_job_of_spot_nodes_alone_survives_the_loss_of_its_host(operator_cluster: Cluster, tmp_path: Path) -> None:
    """A job goes on after its host is lost, with notice and then without.

    The host is the spot node with rank 0 and the rendezvous store.
    """
    capacity = {"onDemand": {"min": 0, "max": 0}}
    with rehearsal(
        operator_cluster, "spot", tmp_path, members=1, nodes={"max": 3}, capacity=capacity, strategy="auto"
    ) as run:
        run.wait_for_spot(2, ready=3)
        with run.incident("the host of the store, 30 s of notice"):
            run.preempt([run.wait_for_members()[0].node], 30)
        assert run.evidence[-1].redone == 0
        with run.incident("the host of the store, without notice"):
            operator_cluster.kill([run.wait_for_members()[0].node])
        assert run.evidence[-1].redone <= run.evidence[-1].uncommitted
        status = run.finish()
        told = [reason for _, reason, _ in run.events()]
    assert status.failures == 0
    assert (status.preemptions, status.preemptions_without_notice) == (2, 1)
    assert status.strategy is not None
    assert status.strategy.reason.startswith("74.5 thousand parameters on 1 rank need about ")
    assert told.count("StrategyChosen") == 1


@pytest.mark.nightly
def test_a_notice_is_heeded_while_the_operator_is_stopped(operator_cluster: Cluster, tmp_path: Path) -> None:
    """Without the operator, the ranks stop together, commit and end.

    Only the next generation waits for the operator.
    """
    with rehearsal(operator_cluster, "alone", tmp_path, members=3, nodes={"max": 3}) as run:
        with run.incident("one node, while the operator is stopped"), run.operator_stopped():
            node, generation = run.wait_for_spot_nodes()[0], run.generation()
            folders = [run.run_directory(member.pod, generation.number) for member in generation.members]
            ranks = [run.rank_process(member.pod, generation.number) for member in generation.members]
            run.preempt([node], 60)
            run.wait("all ranks have left their outcome", lambda: None not in outcomes(folders))
            run.wait("no rank is left", lambda: not any(rank.is_running() for rank in ranks))
            newest = max(record.step for record in run.records())
            assert {
                (each.kind, each.step, each.commit.step) for each in outcomes(folders) if each and each.commit
            } == {(OutcomeKind.DRAINED, newest, newest)}
        assert run.evidence[-1].redone == 0
        run.bring_back()
        run.finish()


@pytest.mark.nightly
def test_hugging_faces_trainer_loses_no_step_to_a_preemption(operator_cluster: Cluster, tmp_path: Path) -> None:
    """EC2 recommends to leave the node first.

    So a pod is ready ahead of time, and no node is missing afterwards.
    """
    pools = [{"name": kind, "provider": "eks", "capacityType": kind} for kind in ("on-demand", "spot")]
    with rehearsal(
        operator_cluster,
        "trainer",
        tmp_path,
        members=1,
        entrypoint={"script": "tests/e2e/jobs/huggingface.py", "args": ["--until", str(tmp_path / "over")]},
        capacity={"onDemand": {"min": 1, "max": 1}, "spot": {"max": 1, "maxPrewarmed": 1}, "pools": pools},
        stability={"nonFinite": "skip"},
    ) as run:
        run.wait_for_spot(1, ready=2)
        nodes = run.wait_for_spot_nodes()
        operator_cluster.preempt(nodes, notice_seconds=30, kind="rebalance")
        run.wait("a pod is ready ahead of time", lambda: run.status().members.waiting == 1)
        with run.incident("one node under Hugging Face's Trainer, 30 s of notice after a hint"):
            run.preempt(nodes, 30)
        incident = run.evidence[-1]
        assert (incident.redone, incident.world_before, incident.world_after) == (0, 2, 2)
        assert incident.reasons == ("Preempted",)
        run.bring_back()
        assert run.finish().failures == 0


def outcomes(folders: Sequence[Path]) -> list[Outcome | None]:
    """What the first rank of each run directory left."""
    return [Outcome.read(folder / outcome_file(0)) for folder in folders]


def _kill_node(run: Rehearsal) -> None:
    run.cluster.kill(run.wait_for_spot_nodes()[:1])


def _kill_host(run: Rehearsal) -> None:
    run.cluster.kill([run.wait_for_members()[0].node])


def _kill_agent(run: Rehearsal) -> None:
    kill(run.agent_process(run.wait_for_members(1, CapacityType.SPOT)[0].pod))


def _kill_zygote(run: Rehearsal) -> None:
    kill(run.zygote_process(run.wait_for_members()[0].pod))


def _kill_rank(run: Rehearsal) -> None:
    kill(run.rank_process(run.wait_for_members()[-1].pod, run.generation().number))


KILLS = (
    ("a spot node", _kill_node, 0),
    ("the node of rank 0", _kill_host, 0),
    ("an agent", _kill_agent, 0),
    ("a zygote", _kill_zygote, 0),
    ("a rank", _kill_rank, 1),
)


def test_without_notice_only_what_was_not_committed_is_redone(operator_cluster: Cluster, tmp_path: Path) -> None:
    with rehearsal(operator_cluster, "no-notice", tmp_path, members=1, nodes={"max": 4}) as run:
        for what, act, num_failures in KILLS:
            run.wait_for_spot(1, ready=3)
            failures = run.status().failures
            with run.incident(f"{what} is killed"):
                act(run)
            assert run.evidence[-1].redone <= run.evidence[-1].uncommitted, run.evidence[-1].row()
            assert run.status().failures - failures == num_failures, f"{what}\n{run.describe()}"
            run.bring_back()
        events = run.events()
        run.finish()
    lost = [message for _, reason, message in events if reason == "NodeLost"]
    assert len(lost) >= 2
    assert len([reason for _, reason, _ in events if reason == "Failure"]) == 1
