"""Editing a running job.

What can change is applied through a drain, and loses no step. What can't change is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cluster_fixtures import wait_for
from e2e.rehearsal import Rehearsal, rehearsal
from spottrain_api.contract.names import LABEL_JOB
from spottrain_api.v1alpha1.status import Phase
from spottrain_local.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

TWO_NODES = {"nodes": {"min": 1, "max": 2}, "capacity": {"onDemand": {"min": 1, "max": 1}, "spot": {"max": 1}}}


@pytest.fixture(scope="module")
def job(operator_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    """A job on two nodes, which all tests of this module edit in turn."""
    with rehearsal(operator_cluster, "edited", tmp_path_factory.mktemp("editing"), members=2, **TWO_NODES) as run:
        yield run


def edit(job: Rehearsal, **spec: Any) -> tuple[bool, str]:
    """Whether the edit was accepted, and what kubectl said."""
    patch = json.dumps({"spec": spec})
    done = job.kubectl.run("patch", "tj", job.name, "--type=merge", "-p", patch)
    return done.returncode == 0, done.stdout + done.stderr


def pods(job: Rehearsal) -> set[str]:
    return {member.pod for member in job.members()}


def test_what_would_make_it_another_run_is_refused(job: Rehearsal) -> None:
    before = job.generation().number
    accepted, said = edit(job, batch={"global": 48})
    assert not accepted
    assert "batch.global can't change while a job exists" in said
    assert job.generation().number == before


@pytest.mark.parametrize(
    ("spec", "reason", "num_nodes", "keeps_pods"),
    [
        pytest.param({"nodes": {"max": 1}}, "ScaleDown", 1, True, id="fewer"),
        pytest.param({"nodes": {"max": 2}}, "Grow", 2, True, id="more"),
        pytest.param({"batch": {"micro": 2}}, "Edited", 2, True, id="micro-batch", marks=pytest.mark.nightly),
        pytest.param({"env": [{"name": "OMP_NUM_THREADS", "value": "2"}]}, "Edited", 2, False, id="environment"),
    ],
)
def test_what_can_change_is_applied_through_a_drain(
    job: Rehearsal, spec: dict[str, Any], reason: str, num_nodes: int, keeps_pods: bool
) -> None:
    before, old_pods = job.status(), pods(job)
    known = len(before.transitions)
    if "env" in spec:
        # A list is replaced as a whole.
        audit = [v for v in job.kubectl.get("tj", job.name)["spec"]["env"] if v["name"] != "OMP_NUM_THREADS"]
        spec = {"env": [*spec["env"], *audit]}
    accepted, said = edit(job, **spec)
    assert accepted, said
    job.wait(
        f"{num_nodes} nodes train with what was edited",
        lambda: len(job.status().transitions) > known and len(job.members()) == num_nodes,
        seconds=120,
    )
    after = job.status()
    # New pods come one by one: the job may go on with the first, and grow.
    assert after.transitions[known].reason == reason
    assert after.steps_redone == 0
    assert job.audit().num_redone == 0
    assert after.failures == 0
    assert bool(pods(job) & old_pods) == keeps_pods


def test_an_edit_that_changes_nothing_for_the_ranks_disturbs_nobody(job: Rehearsal) -> None:
    number, step = job.generation().number, job.status().progress.step
    accepted, said = edit(job, runPolicy={"failureBudget": 7, "hangTimeoutSeconds": 300})
    assert accepted, said
    job.wait("it goes on", lambda: job.status().progress.step > step + 10)
    assert job.generation().number == number


def test_a_mistyped_script_waits_to_be_corrected(job: Rehearsal) -> None:
    before = job.status()
    assert before.generation is not None
    script = job.kubectl.get("tj", job.name)["spec"]["entrypoint"]["script"]
    edit(job, entrypoint={"script": "nowhere.py"})
    job.wait("it waits", lambda: "The job waits until it is edited" in job.status().message)
    waiting = job.status()
    assert waiting.phase is Phase.RECOVERING
    assert "file nowhere.py does not exist" in waiting.message
    edit(job, entrypoint={"script": script})
    job.wait("it trains on", lambda: job.members() and job.status().progress.step > waiting.progress.step)
    after = job.status()
    assert after.generation is not None
    assert after.generation.number == before.generation.number + 2
    assert after.failures == before.failures


def test_suspended_in_the_middle_of_a_drain(job: Rehearsal) -> None:
    accepted, said = edit(job, entrypoint={"args": ["--until", str(job.folder / "over"), "--step-seconds", "0.02"]})
    assert accepted, said
    job.wait("it drains", lambda: job.status().phase is not Phase.RUNNING)
    edit(job, runPolicy={"suspend": True})
    job.wait("it is suspended", lambda: job.status().phase is Phase.SUSPENDED)
    job.wait("it holds no pods", lambda: not job.processes())
    suspended = job.status()
    assert suspended.commit is not None
    assert suspended.commit.step == suspended.progress.step
    edit(job, runPolicy={"suspend": False})
    job.wait(
        "it goes on", lambda: job.members() and job.status().progress.step > suspended.progress.step, seconds=120
    )
    assert job.audit().num_redone == 0


def test_it_ends_as_if_it_had_never_been_edited(job: Rehearsal) -> None:
    status = job.finish()
    assert (status.failures, status.steps_redone) == (0, 0)
    assert not job.processes()
    job.kubectl("delete", "tj", job.name)
    wait_for(lambda: not job.kubectl.list("pod", labels=f"{LABEL_JOB}={job.name}"), "its pods go with it")
