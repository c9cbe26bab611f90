"""Jobs that are wrong in ways that only show when they run.

Each ends with a sentence, and disturbs no other job. All of them run side by side on one cluster, beside a healthy
job.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.exceptions import ClientError

from cluster_fixtures import Kubectl, wait_for
from shared_clusters import ROOMY
from spottrain_api.v1alpha1.status import Condition, Phase, TrainingJobStatus
from spottrain_local.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SCRIPT = "tests/e2e/jobs/misbehave.py"
VANISHING = "vanishing"  # a bucket
NAMESPACE = "bad-input"
# All of them run at once, on a node that no other test uses.
PLACE = {
    "nodeSelector": ROOMY.labels,
    "tolerations": [taint.model_dump() | {"operator": "Equal"} for taint in ROOMY.taints],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """A job that is wrong, and how it must fail.

    `spec` replaces fields of a good job. The job must fail for `reason`, and say `sentences`.
    """

    name: str
    reason: str
    sentences: tuple[str, ...]
    args: tuple[str, ...] = ()
    spec: dict[str, Any] = field(default_factory=dict)
    failures: int = 0
    generations: int = 1


def raising(name: str, budget: int) -> Wrong:
    return Wrong(
        name=name,
        args=("--raise-at", "1"),
        spec={"runPolicy": {"failureBudget": budget}},
        reason="FailureBudgetExceeded",
        sentences=(
            "ValueError: the learning rate must be below 3, not 17",
            "misbehave.py, line ",
            f"this was failure {budget + 1}, and runPolicy.failureBudget is {budget}",
        ),
        failures=budget + 1,
        generations=budget + 1,
    )


def hanging(name: str, step: int, limit: dict[str, int], sentence: str) -> Wrong:
    return Wrong(
        name=name,
        args=("--steps", "100", "--hang-at", str(step)),
        spec={"runPolicy": {"failureBudget": 0, **limit}},
        reason="FailureBudgetExceeded",
        sentences=(sentence, "see what the script waits for, or raise the limit"),
        failures=1,
    )


def mounting(name: str, volume: dict[str, Any], sentence: str) -> Wrong:
    mounts = [{"name": "keys", "mountPath": "/tmp/keys"}]
    return Wrong(
        name=name,
        spec={"podTemplate": {"volumes": [{"name": "keys", **volume}], "volumeMounts": mounts}},
        reason="CannotStart",
        sentences=(f"pod {name}-1 can't start: ", sentence),
        generations=0,
    )


WRONG = [
    Wrong(
        name="no-script",
        spec={"entrypoint": {"script": "nowhere.py"}},
        reason="EntrypointNotFound",
        sentences=("entrypoint.script: file nowhere.py does not exist in the image", "Correct the path"),
        failures=1,
    ),
    Wrong(
        name="no-bucket",
        spec={"checkpoint": {"uri": "s3://nowhere/run"}},
        reason="CheckpointStorageMissing",
        sentences=("The bucket s3://nowhere at", "does not exist: create it, or correct checkpoint.uri"),
        failures=1,
    ),
    Wrong(
        name="denied",
        spec={"env": [{"name": "AWS_ACCESS_KEY_ID", "value": "stranger"}]},
        reason="CheckpointAccessDenied",
        sentences=("Access to s3://checkpoints/denied", "is denied", "Correct AWS_ACCESS_KEY_ID"),
        failures=1,
    ),
    Wrong(
        name="no-store",
        spec={"checkpoint": {"uri": "s3://checkpoints/run", "endpointURL": "http://127.0.0.1:9"}},
        reason="CheckpointStorageUnavailable",
        sentences=("can't be reached: check checkpoint.endpointURL (of a command, --endpoint-url)",),
        failures=1,
    ),
    raising("raises", 0),
    raising("raises-twice", 1),
    hanging("hangs", 3, {"hangTimeoutSeconds": 5}, "no rank made a step within runPolicy.hangTimeoutSeconds (5)"),
    hanging(
        "never-begins",
        1,
        {"startTimeoutSeconds": 15},
        "no rank made a first step within runPolicy.startTimeoutSeconds (15)",
    ),
    hanging(
        "never-opens-its-session",
        0,
        {"startTimeoutSeconds": 10},
        "no rank made a first step within runPolicy.startTimeoutSeconds (10)",
    ),
    Wrong(
        name="no-account",
        spec={"podTemplate": {"serviceAccountName": "nobody"}},
        reason="CannotStart",
        sentences=(
            "Kubernetes refuses the job's pods: ",
            'serviceaccount "nobody" not found',
            "provide what is missing, or change",
        ),
        generations=0,
    ),
    Wrong(
        name="no-such-policy",
        spec={"podTemplate": {"imagePullPolicy": "Sometimes"}},
        reason="CannotStart",
        sentences=("Kubernetes refuses the job's pods: ", "supported values"),
        generations=0,
    ),
    Wrong(
        name="no-secret",
        spec={"env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "gone", "key": "key"}}}]},
        reason="CannotStart",
        sentences=("pod no-secret-1 can't start: ", 'secret "gone" not found'),
        generations=0,
    ),
    Wrong(
        name="no-first-step",
        spec={
            "podTemplate": {"initContainers": [{"name": "fetch", "image": "none", "command": ["sh", "-c", "exit 3"]}]}
        },
        reason="CannotStart",
        sentences=(
            "container fetch of pod no-first-step-",
            " ended with exit code 3 (Error). See its log (kubectl logs -n ",
        ),
        generations=0,
    ),
    Wrong(
        name="no-agent",
        spec={"env": [{"name": "PYTHONPATH", "value": str(Path(__file__).parent / "jobs" / "without_agent")}]},
        reason="CannotStart",
        sentences=(
            "3 pods ended before they could train; the last: the container of pod no-agent-",
            ": No module named spottrain_agent. The image lacks spottrain's agent: build it on the spottrain-trainer",
            ". See its log (kubectl logs -n ",
        ),
        generations=0,
    ),
    mounting("no-volume", {"secret": {"secretName": "lost"}}, 'secret "lost" not found'),
]


# Beside the healthy trainer: a container that runs first, and a sidecar that ends as often as it starts.
BESIDE = {
    "initContainers": [{"name": "first", "image": "none", "command": ["true"]}],
    "sidecars": [{"name": "ends", "image": "none", "command": ["sh", "-c", "exit 1"]}],
}


def manifest(name: str, spec: dict[str, Any], args: tuple[str, ...] = ()) -> dict[str, Any]:
    good = {
        "image": "local/trainer",
        "entrypoint": {"script": SCRIPT, "args": list(args)},
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "nodes": {"max": 1},
        "capacity": {"onDemand": {"min": 1}},
        "batch": {"global": 4, "micro": 4},
        "checkpoint": {"uri": f"s3://checkpoints/{name}", "interval": "50steps"},
    }
    pods = {"podTemplate": PLACE | spec.get("podTemplate", {})}
    return {
        "apiVersion": "spottrain.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": good | spec | pods,
    }


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of a cluster, by name."""

    kubectl: Kubectl
    store: dict[str, str]  # how to reach the cluster's object store, as environment variables

    def s3(self) -> Any:
        """A client of the cluster's object store."""
        return boto3.client(
            "s3",
            endpoint_url=self.store["AWS_ENDPOINT_URL_S3"],
            region_name=self.store["AWS_REGION"],
            aws_access_key_id=self.store["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.store["AWS_SECRET_ACCESS_KEY"],
        )

    def condition(self, name: str, kind: str) -> Condition | None:
        return next((each for each in self.status(name).conditions if each.type == kind), None)

    def apply(self, *jobs: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(jobs))

    def status(self, name: str) -> TrainingJobStatus:
        return TrainingJobStatus.model_validate(self.kubectl.get("tj", name, NAMESPACE).get("status") or {})

    def has_seen_edits(self, name: str) -> bool:
        """Whether the operator has seen the newest spec."""
        job = self.kubectl.get("tj", name, NAMESPACE)
        return bool(job["status"]["observedGeneration"] == job["metadata"]["generation"])

    def pods(self, name: str) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.found_pods(name)]

    def found_pods(self, name: str) -> list[Any]:
        return self.kubectl.list("pod", NAMESPACE, f"spottrain.dev/job={name}")

    def holds_nodes(self, name: str) -> bool:
        """Whether a pod of the job has not ended."""
        return any(pod["status"]["phase"] not in ("Failed", "Succeeded") for pod in self.found_pods(name))

    def failed(self, name: str, seconds: float = 120.0) -> TrainingJobStatus:
        """The status of the job, which must fail and let its nodes go."""
        wait_for(lambda: self.status(name).phase is Phase.FAILED, f"{name} fails: {self.status(name)}", seconds)
        wait_for(lambda: not self.holds_nodes(name), f"the pods of {name} end")
        return self.status(name)


@pytest.fixture(scope="module")
def jobs(operator_cluster: Cluster) -> Iterator[Jobs]:
    """All the wrong jobs, the healthy one, and one that commits a small model."""
    kubectl = Kubectl(kubeconfig=operator_cluster.kubeconfig)
    kubectl.create_namespace(NAMESPACE)
    found = Jobs(kubectl, operator_cluster.running_status()["store"])
    wrong = [manifest(each.name, each.spec, each.args) for each in WRONG]
    healthy = manifest("healthy", {"podTemplate": BESIDE}, ("--steps", "1000000", "--step-seconds", "0.5"))
    small = manifest("small", {"checkpoint": {"uri": "s3://checkpoints/model"}})
    vanishing = manifest(
        "vanishing",
        {"checkpoint": {"uri": f"s3://{VANISHING}/run", "interval": "2steps"}},
        ("--steps", "1000000", "--step-seconds", "0.5"),
    )
    found.s3().create_bucket(Bucket=VANISHING)
    found.apply(healthy, vanishing, small, *wrong)
    try:
        yield found
    finally:
        kubectl("delete", "tj", "--all", "-n", NAMESPACE)
        kubectl("delete", "namespace", NAMESPACE)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_a_job_that_cannot_work_ends_with_a_sentence(jobs: Jobs, wrong: Wrong) -> None:
    status = jobs.failed(wrong.name)
    [condition] = [each for each in status.conditions if each.type == "Failed"]
    assert condition.status == "True"
    assert condition.reason == wrong.reason, condition.message
    for sentence in wrong.sentences:
        assert sentence in condition.message
    assert status.message == condition.message
    assert (status.failures, status.generation.number if status.generation else 0) == (
        wrong.failures,
        wrong.generations,
    )
    if status.start_time and status.completion_time:
        print(f"{wrong.name}: {(status.completion_time - status.start_time).total_seconds():.1f} s from its start")


def test_a_checkpoint_of_another_model_is_not_overwritten(jobs: Jobs) -> None:
    wait_for(lambda: jobs.status("small").phase is Phase.SUCCEEDED, "the small model is trained", 60)
    wide = manifest("wide", {"checkpoint": {"uri": "s3://checkpoints/model"}}, ("--width", "5"))
    jobs.apply(wide)
    status = jobs.failed("wide")
    assert [c.reason for c in status.conditions if c.type == "Failed"] == ["CheckpointIncompatible"], status.message
    assert "checkpoint.uri" in status.message


def test_a_bucket_that_vanishes_is_a_condition_and_training_goes_on(jobs: Jobs) -> None:
    name, s3 = "vanishing", jobs.s3()
    wait_for(lambda: jobs.status(name).commit, "a commit is made", 60)

    def deleted() -> bool:
        """Whether the bucket is gone.

        A commit that comes while SeaweedFS deletes one leaves half of it, for which it answers InternalError.
        """
        try:
            for found in s3.list_objects_v2(Bucket=VANISHING).get("Contents", ()):
                s3.delete_object(Bucket=VANISHING, Key=found["Key"])
            s3.delete_bucket(Bucket=VANISHING)
        except ClientError as error:
            return bool(error.response["Error"]["Code"] == "NoSuchBucket")
        return False

    def healthy() -> str | None:
        condition = jobs.condition(name, "CheckpointsHealthy")
        return condition.status if condition is not None else None

    wait_for(lambda: deleted() and healthy() == "False", "the condition says so", 60)

    def condition_of_saves() -> Condition:
        condition = jobs.condition(name, "CheckpointsHealthy")
        assert condition is not None
        return condition

    missing = "CheckpointStorageMissing"
    wait_for(
        lambda: deleted() and condition_of_saves().reason == missing,
        f"the reason says so: {condition_of_saves()}",
        60,
    )
    condition = condition_of_saves()
    assert "does not exist: create it, or correct checkpoint.uri" in condition.message
    assert jobs.status(name).phase is Phase.RUNNING
    s3.create_bucket(Bucket=VANISHING)
    wait_for(lambda: healthy() == "True", "saves succeed again", 60)
    status = jobs.status(name)
    assert (status.phase, status.failures, status.transitions) == (Phase.RUNNING, 0, ())
    told = jobs.kubectl("get", "events", "-n", NAMESPACE, "--field-selector", f"involvedObject.name={name}")
    assert "CheckpointStorageMissing" in told
    jobs.kubectl.delete("tj", name, NAMESPACE)
    wait_for(lambda: not jobs.pods(name), "its pods go")


def test_a_healthy_job_beside_them_is_not_disturbed(jobs: Jobs) -> None:
    step = jobs.status("healthy").progress.step
    wait_for(lambda: jobs.status("healthy").progress.step > step + 5, "the healthy job goes on", 60)
    status = jobs.status("healthy")
    assert (status.phase, status.failures, status.transitions) == (Phase.RUNNING, 0, ())
    assert status.generation is not None
    assert status.generation.number == 1


def test_a_sidecar_that_ends_again_and_again_leaves_the_ranks_alone(jobs: Jobs) -> None:
    def beside() -> dict[str, Any]:
        [pod] = jobs.found_pods("healthy")
        return {each["name"]: each for each in pod["status"]["initContainerStatuses"]}

    wait_for(lambda: beside()["ends"]["restartCount"] >= 2, "Kubernetes restarts the sidecar")
    assert beside()["first"]["state"]["terminated"]["exitCode"] == 0
    step = jobs.status("healthy").progress.step
    wait_for(lambda: jobs.status("healthy").progress.step > step, "the healthy job goes on", 60)
    status = jobs.status("healthy")
    assert (status.phase, status.failures, status.transitions) == (Phase.RUNNING, 0, ())


def test_what_failed_is_not_tried_again(jobs: Jobs) -> None:
    """Not even by the pass that an edit causes."""
    created = {wrong.name: jobs.failed(wrong.name).last_sequence for wrong in WRONG}
    for name in created:
        jobs.kubectl.patch("tj", name, {"spec": {"runPolicy": {"failureBudget": 9}}}, NAMESPACE)
    wait_for(lambda: all(map(jobs.has_seen_edits, created)), "passes see the edits")
    assert {name: jobs.status(name).last_sequence for name in created} == created
    assert [wrong.name for wrong in WRONG if jobs.holds_nodes(wrong.name)] == []


def test_the_logs_of_a_failed_job_stay_until_it_is_deleted(jobs: Jobs) -> None:
    jobs.failed("raises")
    [pod] = jobs.found_pods("raises")
    assert pod["status"]["phase"] == "Failed"
    error = "ValueError: the learning rate must be below 3, not 17"
    assert error in jobs.kubectl("logs", "-n", NAMESPACE, "raises-1")
    command = [
        str(Path(sys.executable).with_name("spottrain")),
        "logs",
        "raises",
        f"--namespace={NAMESPACE}",
        f"--kubeconfig={jobs.kubectl.kubeconfig}",
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 3, shown.stderr
    assert error in shown.stdout
    assert "spottrain: Generation 1: node rank 0 on raises-1." in shown.stderr
    assert "spottrain: Failed: " in shown.stderr
    jobs.kubectl.delete("tj", "raises", NAMESPACE)
    wait_for(lambda: not jobs.pods("raises"), "its pod goes")
