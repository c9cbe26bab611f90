"""A pod's status as a function of its containers."""

from typing import Any

import pytest

from spottrain_local.node.containers import ContainerRecord, ContainerState, Running, Terminated, Waiting
from spottrain_local.node.pod_status import compute_status, container_status, parse_state, qos_class
from spottrain_local.node.restarts import Backoff, restarts

NOW = "2026-01-01T00:00:00Z"
OK = Terminated(exit_code=0, reason="Completed", started_at=NOW, finished_at=NOW)
BAD = Terminated(exit_code=3, reason="Error", started_at=NOW, finished_at=NOW)
RUN = Running(started_at="2026-01-01T00:00:00.123456789Z")
WAIT = Waiting(reason="ContainerCreating")
BACKOFF = Waiting(reason="CrashLoopBackOff", message="back-off")


def pod(policy: str = "Always", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p", "generation": 2}, "spec": {"restartPolicy": policy, "containers": [], **spec}}


def record(state: ContainerState, **changes: Any) -> ContainerRecord:
    running = isinstance(state, Running)
    values: dict[str, Any] = {"name": "c", "image": "i", "state": state, "ready": running, "started": running}
    return ContainerRecord(**(values | changes))


def status(
    records: list[ContainerRecord], spec: dict[str, Any] | None = None, *, now: str = NOW, **changes: Any
) -> dict[str, Any]:
    return compute_status(
        spec or pod(), records, pod_ip="127.1.0.2", host_ip="127.1.0.1", start_time=NOW, now=now, **changes
    )


@pytest.mark.parametrize(
    ("policy", "states", "phase"),
    [
        pytest.param("Always", [WAIT], "Pending", id="not-started"),
        pytest.param("Always", [RUN], "Running", id="running"),
        pytest.param("Always", [RUN, WAIT], "Running", id="one-running"),
        pytest.param("Always", [OK], "Running", id="always-comes-back"),
        pytest.param("OnFailure", [BAD], "Running", id="on-failure-comes-back"),
        pytest.param("OnFailure", [OK], "Succeeded", id="on-failure-done"),
        pytest.param("OnFailure", [OK, BAD], "Running", id="on-failure-one-comes-back"),
        pytest.param("Never", [OK], "Succeeded", id="never-done"),
        pytest.param("Never", [OK, BAD], "Failed", id="never-failed"),
        pytest.param("Never", [BAD, RUN], "Running", id="never-one-still-runs"),
    ],
)
def test_phase(policy: str, states: list[ContainerState], phase: str) -> None:
    assert status([record(state) for state in states], pod(policy))["phase"] == phase


def test_a_pod_that_waits_between_restarts_is_running() -> None:
    assert status([record(BACKOFF, last=BAD)])["phase"] == "Running"


def test_a_failed_init_container_fails_a_pod_that_never_restarts() -> None:
    records = [record(BAD, kind="init", name="i"), record(Waiting(reason="PodInitializing"))]
    assert status(records, pod("Never"))["phase"] == "Failed"
    assert status(records, pod("Always"))["phase"] == "Pending"


@pytest.mark.parametrize(("state", "phase"), [(OK, "Succeeded"), (BAD, "Failed"), (WAIT, "Failed")])
def test_a_stopped_pods_phase_is_terminal_whatever_its_policy(state: ContainerState, phase: str) -> None:
    assert status([record(state)], final=True)["phase"] == phase


def test_a_pod_the_node_ends_is_failed_for_that_reason() -> None:
    result = status([record(OK)], final=True, failure=("Terminated", "The node shuts down."))
    assert (result["phase"], result["reason"], result["message"]) == ("Failed", "Terminated", "The node shuts down.")


def conditions(result: dict[str, Any]) -> dict[str, Any]:
    return {c["type"]: c for c in result["conditions"]}


def test_conditions_keep_their_time_until_they_change() -> None:
    first = status([record(RUN, ready=False)])
    assert conditions(first)["Ready"]["reason"] == "ContainersNotReady"
    later = "2026-01-01T00:01:00Z"
    second = conditions(status([record(RUN)], pod() | {"status": first}, now=later))
    assert second["Ready"]["status"] == "True"
    assert second["Ready"]["lastTransitionTime"] == later
    assert second["Initialized"]["lastTransitionTime"] == NOW


def test_readiness_gates_hold_back_ready_only() -> None:
    gated = pod(readinessGates=[{"conditionType": "example.com/g"}])
    found = conditions(status([record(RUN)], gated))
    assert found["ContainersReady"]["status"] == "True"
    assert (found["Ready"]["status"], found["Ready"]["reason"]) == ("False", "ReadinessGatesNotReady")


def test_the_schedulers_condition_is_not_touched() -> None:
    assert "PodScheduled" not in conditions(status([record(RUN)]))


@pytest.mark.parametrize("state", [OK, BAD, BACKOFF])
def test_states_survive_the_way_through_the_api(state: ContainerState) -> None:
    assert parse_state(container_status(record(state))["state"]) == state


def test_an_init_container_is_ready_once_it_has_succeeded() -> None:
    """A sidecar is ready while it runs."""
    ready = [container_status(record(state, kind="init", ready=True))["ready"] for state in (RUN, OK, BAD)]
    assert ready == [False, True, False]
    assert container_status(record(RUN, kind="sidecar", ready=True))["ready"]


def test_times_have_whole_seconds() -> None:
    assert container_status(record(RUN))["state"] == {"running": {"startedAt": NOW}}


def resources(**values: Any) -> dict[str, Any]:
    return pod(containers=[{"name": "c", "resources": values}])


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (resources(), "BestEffort"),
        (resources(requests={"cpu": "1"}), "Burstable"),
        (resources(limits={"cpu": "1", "memory": "1Gi"}), "Guaranteed"),
        (resources(limits={"cpu": "1", "memory": "1Gi"}, requests={"cpu": "500m"}), "Burstable"),
        (resources(limits={"nvidia.com/gpu": "1"}), "BestEffort"),
    ],
)
def test_quality_of_service(spec: dict[str, Any], expected: str) -> None:
    assert qos_class(spec) == expected


@pytest.mark.parametrize(
    ("policy", "kind", "ended", "again"),
    [
        ("Always", "main", OK, True),
        ("OnFailure", "main", OK, False),
        ("OnFailure", "main", BAD, True),
        ("Never", "main", BAD, False),
        ("Always", "init", OK, False),
        ("Always", "init", BAD, True),
        ("Never", "init", BAD, False),
        ("Never", "sidecar", OK, True),
    ],
)
def test_restart_policy(policy: str, kind: Any, ended: Terminated, again: bool) -> None:
    assert restarts(policy, kind, ended) is again


def test_first_restart_is_immediate_then_delays_double_to_the_limit() -> None:
    backoff = Backoff(base_seconds=10, max_seconds=60)
    assert [backoff.delay(1) for _ in range(6)] == [0, 10, 20, 40, 60, 60]


def test_a_long_run_makes_the_past_forgotten() -> None:
    backoff = Backoff(base_seconds=10, max_seconds=60)
    backoff.delay(1), backoff.delay(1)
    assert backoff.delay(601) == 0
