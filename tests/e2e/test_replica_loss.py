"""Loss of nodes without notice, with replicas in the members' memory.

At most two steps are lost.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from e2e.rehearsal import Rehearsal, rehearsal
from spottrain_local.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(240)]


def has_committed(run: Rehearsal, step: int) -> bool:
    commit = run.status().commit
    return commit is not None and commit.step >= step


def num_steps(run: Rehearsal, generation: int) -> int:
    return len({record.step for record in run.records() if record.generation == generation})


def test_a_node_lost_without_notice_costs_two_steps_at_most(operator_cluster: Cluster, tmp_path: Path) -> None:
    checkpoint = {
        "uri": "s3://checkpoints/replicas",
        "interval": "10000steps",
        "peerReplicas": 1,
        "peerInterval": 1,
    }
    with rehearsal(operator_cluster, "replicas", tmp_path, members=1, nodes={"max": 4}, checkpoint=checkpoint) as run:
        run.wait_for_spot(2, ready=4)
        for what in ("a spot node is killed", "another one"):
            # A generation that has only begun has nothing in memory yet, and the commit is as new.
            run.wait("ten steps of the newest generation", lambda: num_steps(run, run.generation().number) >= 10)
            with run.incident(what):
                run.cluster.kill(run.wait_for_spot_nodes()[:1])
            assert run.evidence[-1].redone <= 2, run.evidence[-1].row()
            replicated = run.generation().replicated_step
            assert replicated is not None, run.describe()
            run.wait("the step is committed to the store", partial(has_committed, run, replicated.step))
        status = run.finish()
    assert status.failures == 0
    assert status.preemptions_without_notice == 2
    # What the interval of commits is reckoned with: neither was a loss.
    assert [t.from_replicas for t in status.transitions if t.reason == "NodeLost"] == [True, True]
