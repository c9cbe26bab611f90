"""Node rank 0 relays its peers on a local cluster, and hangs, dies or goes."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from e2e.rehearsal import Rehearsal, kill, rehearsal
from spottrain_api.contract.names import ANNOTATION_CONTROL_URL
from spottrain_local.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(300)]


def with_operator(run: Rehearsal) -> set[int]:
    """Node ranks of the members whose agents hold a connection to the operator."""
    members = run.members()
    if not members:
        return set()
    pod = run.kubectl.get("pod", members[0].pod)
    port = urlsplit(pod["metadata"]["annotations"][ANNOTATION_CONTROL_URL]).port
    return {
        member.node_rank
        for member in members
        if any(
            connection.raddr and connection.raddr.port == port and connection.status == psutil.CONN_ESTABLISHED
            for connection in run.agent_process(member.pod).net_connections("tcp")
        )
    }


def test_peers_lose_no_step_with_the_agent_that_relays_them(operator_cluster: Cluster, tmp_path: Path) -> None:
    capacity = {"onDemand": {"min": 0, "max": 0}}
    with rehearsal(operator_cluster, "relay", tmp_path, members=3, nodes={"max": 3}, capacity=capacity) as run:
        run.wait("node rank 0 alone is connected", lambda: with_operator(run) == {0})
        number = run.generation().number
        relay = run.agent_process(run.wait_for_members()[0].pod)
        begun = time.monotonic()
        relay.send_signal(signal.SIGSTOP)
        run.wait("its peers go to the operator", lambda: {1, 2} <= with_operator(run), seconds=10)
        print(f"peers left a relay that hangs after {time.monotonic() - begun:.1f} s")
        relay.send_signal(signal.SIGCONT)
        run.wait("they come back", lambda: with_operator(run) == {0})
        assert run.generation().number == number, "training went on"

        with run.incident("a relayed member, 30 s of notice"):
            run.preempt([run.wait_for_members(2)[1].node], 30)
        run.bring_back()
        run.wait_for_spot(3, ready=3)
        run.wait("node rank 0 alone is connected", lambda: with_operator(run) == {0})
        with run.incident("the relay, 30 s of notice"):
            run.preempt([run.wait_for_members()[0].node], 30)
        assert [item.redone for item in run.evidence] == [0, 0]

        run.bring_back()
        run.wait_for_spot(3, ready=3)
        run.wait("node rank 0 alone is connected", lambda: with_operator(run) == {0})
        with run.incident("the relay's agent is killed"):
            kill(run.agent_process(run.wait_for_members()[0].pod))
        assert run.evidence[-1].redone <= run.evidence[-1].uncommitted
        run.wait("node rank 0 alone is connected", lambda: with_operator(run) == {0})
        status = run.finish()
    assert status.steps_redone <= run.evidence[-1].uncommitted
