"""The operator as a process against a real control plane.

Jobs become pods, the operator gets the agents' reports, and it survives crashes.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from cluster_fixtures import Kubectl, wait_for
from spottrain_api.contract import AgentReport, Assignment, AssignmentAction

pytestmark = pytest.mark.cluster

CRDS = Path(__file__).parents[2] / "crds"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class OperatorProcess:
    """`python -m spottrain_operator`, which a test can kill and start again."""

    kubectl: Kubectl
    namespace: str
    folder: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, identity: str = "operator-0") -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("KUBERNETES_")} | {
            "KUBECONFIG": str(self.kubectl.kubeconfig),
            "SPOTTRAIN_CONTROL_URL": self.url,
            "SPOTTRAIN_CONTROL_HOST": "127.0.0.1",
            "SPOTTRAIN_CONTROL_PORT": str(self.port),
            "POD_NAMESPACE": self.namespace,
            # Operators of other tests lead other namespaces, and may have left their leases behind.
            "SPOTTRAIN_WATCH_NAMESPACES": self.namespace,
            "POD_NAME": identity,
        }
        log = (self.folder / "operator.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "spottrain_operator"], env=env, stdout=log, stderr=log, cwd=self.folder
        )

    def wait_ready(self, seconds: float = 20.0) -> None:
        wait_for(lambda: self.get("/readyz")[0] == 200, f"operator ready; its log:\n{self.log()}", seconds)

    def log(self) -> str:
        return (self.folder / "operator.log").read_text()

    def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(15)

    def get(self, path: str, token: str | None = None) -> tuple[int, bytes]:
        return self.request(path, None, token)

    def request(self, path: str, body: bytes | None, token: str | None) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(self.url + path, data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=40) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""


@pytest.fixture
def namespace(kubectl: Kubectl) -> Iterator[str]:
    name = f"operator-{uuid4().hex[:8]}"
    kubectl("apply", "--server-side", "-f", str(CRDS))
    wait_for(lambda: kubectl.run("get", "tj").returncode == 0, "the CRD is served")
    kubectl("create", "namespace", name)
    kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    yield name
    kubectl.run("delete", "tj", "--all", "-n", name, "--wait=false")
    kubectl.run("delete", "namespace", name, "--wait=false")


@contextmanager
def running(kubectl: Kubectl, namespace: str, folder: Path) -> Iterator[OperatorProcess]:
    operator = OperatorProcess(kubectl=kubectl, namespace=namespace, folder=folder)
    try:
        operator.start()
        operator.wait_ready()
        yield operator
    finally:
        if operator.process is not None and operator.process.poll() is None:
            operator.process.kill()
            operator.process.wait(10)


@pytest.fixture
def operator(kubectl: Kubectl, namespace: str, tmp_path: Path) -> Iterator[OperatorProcess]:
    with running(kubectl, namespace, tmp_path) as process:
        yield process


@dataclass(frozen=True)
class Jobs:
    """kubectl, as far as jobs in one namespace go."""

    kubectl: Kubectl
    namespace: str

    def apply(self, name: str, **changes: Any) -> None:
        spec: dict[str, Any] = {
            "image": "local/none",
            "entrypoint": {"script": "train.py"},
            "nodes": {"min": 2, "max": 3},
            "capacity": {"onDemand": {"min": 1}, "spot": {"max": 2}},
            "batch": {"global": 8},
            # The pods need not run: no node has that many accelerators.
            "resources": {"limits": {"nvidia.com/gpu": "64"}},
            "checkpoint": {"uri": f"s3://checkpoints/{self.namespace}/{name}"},
        }
        job = {
            "apiVersion": "spottrain.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name},
            "spec": spec | changes,
        }
        self.kubectl("apply", "-n", self.namespace, "-f", "-", stdin=yaml.safe_dump(job))

    def status(self, name: str) -> dict[str, Any]:
        return dict(self.kubectl.get("tj", name, self.namespace).get("status", {}))

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        conditions = self.status(name).get("conditions", ())
        return next((each for each in conditions if each["type"] == kind), {"status": None, "reason": None})

    def has_run(self, name: str) -> None:
        """Set a status that says the job has had generations.

        The fourth of them has ended.
        """
        generation = {
            **{"number": 4, "state": "Ended", "worldSize": 3, "startedAt": "2026-01-01T00:00:00Z"},
            **{"rendezvousID": "g4", "rendezvousEndpoint": "10.0.0.1:1"},
        }
        merge = ("--type=merge", "-p", json.dumps({"status": {"generation": generation}}))
        self.kubectl("patch", "tj", name, "-n", self.namespace, "--subresource=status", *merge)

    def pods(self, name: str) -> list[Any]:
        pods = self.kubectl.list("pod", self.namespace, f"spottrain.dev/job={name}")
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def capacity(self, name: str) -> list[str]:
        return sorted(pod["metadata"]["labels"]["spottrain.dev/capacity-type"] for pod in self.pods(name))


@pytest.fixture
def jobs(kubectl: Kubectl, namespace: str) -> Jobs:
    return Jobs(kubectl, namespace)


def test_a_job_becomes_restricted_pods_on_both_kinds_of_capacity(operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.apply("gpt")
    wait_for(lambda: jobs.capacity("gpt") == ["on-demand", "spot", "spot"], f"three pods\n{operator.log()}")
    assert jobs.status("gpt")["phase"] == "Pending"
    [url] = {
        env["value"]
        for pod in jobs.pods("gpt")
        for env in pod["spec"]["containers"][0]["env"]
        if env["name"] == "SPOTTRAIN_CONTROL_URL"
    }
    assert url == operator.url
    wait_for(lambda: b'spottrain_job_phase{job_name="gpt"' in operator.get("/metrics")[1], "it has metrics")
    jobs.kubectl("delete", "tj", "gpt", "-n", jobs.namespace)
    wait_for(lambda: not jobs.pods("gpt"), "the job's pods go with it")
    wait_for(lambda: b'job="gpt"' not in operator.get("/metrics")[1], "its metrics go too")


def test_an_agent_is_heard_and_told(operator: OperatorProcess, jobs: Jobs, kubectl: Kubectl) -> None:
    jobs.apply("gpt")
    wait_for(lambda: len(jobs.pods("gpt")) == 3, "three pods")
    pod = jobs.pods("gpt")[0]["metadata"]
    token = kubectl(
        *("create", "token", "default", "-n", jobs.namespace, "--audience=spottrain"),
        *("--bound-object-kind=Pod", f"--bound-object-name={pod['name']}", f"--bound-object-uid={pod['uid']}"),
    ).strip()
    status, body = operator.get("/v1/assignment", token)
    assert status == 200
    assert Assignment.from_json(body).action is AssignmentAction.WAIT
    report = AgentReport(pod=pod["name"], pod_uid=pod["uid"], rendezvous_port=1, sent_at=datetime.now(UTC))
    assert operator.request("/v1/report", report.to_json().encode(), token)[0] == 204
    another = report.model_copy(update={"pod": jobs.pods("gpt")[1]["metadata"]["name"]})
    assert operator.request("/v1/report", another.to_json().encode(), token)[0] == 403
    assert operator.get("/v1/assignment", "stolen")[0] == 401


def test_a_killed_operator_comes_back_in_seconds_and_doubles_nothing(operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.apply("gpt")
    wait_for(lambda: len(jobs.pods("gpt")) == 3, "three pods")
    before = {pod["metadata"]["uid"] for pod in jobs.pods("gpt")}
    operator.end(signal.SIGKILL)
    jobs.kubectl("delete", "pod", "gpt-1", "-n", jobs.namespace, "--grace-period=0", "--force")
    operator.start()
    operator.wait_ready(8.0)
    wait_for(lambda: len(jobs.pods("gpt")) == 3, "the deleted pod is replaced")
    assert len({pod["metadata"]["uid"] for pod in jobs.pods("gpt")} & before) == 2


def test_a_job_of_a_namespace_that_is_not_watched_is_left_alone(operator: OperatorProcess, jobs: Jobs) -> None:
    other = Jobs(jobs.kubectl, f"{jobs.namespace}-other")
    other.kubectl("create", "namespace", other.namespace)
    try:
        other.apply("theirs")
        jobs.apply("mine")
        wait_for(lambda: jobs.pods("mine"), f"its own job has pods\n{operator.log()}")
        assert other.status("theirs") == {}
        assert other.pods("theirs") == []
    finally:
        other.kubectl.run("delete", "namespace", other.namespace, "--wait=false")


def test_sigterm_ends_it_and_frees_the_lease(operator: OperatorProcess, jobs: Jobs) -> None:
    assert operator.end(signal.SIGTERM) == 0, operator.log()
    lease = jobs.kubectl.get("lease", "spottrain-operator", jobs.namespace)
    assert not lease["spec"].get("holderIdentity")
    operator.start(identity="operator-1")
    operator.wait_ready(8.0)


def test_pods_that_kubernetes_refuses_fail_the_job_with_a_sentence(operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.apply("broken", podTemplate={"imagePullPolicy": "nowhere"})
    jobs.apply("fine")
    wait_for(lambda: jobs.status("broken").get("phase") == "Failed", f"the job fails\n{operator.log()}")
    assert "nowhere" in jobs.status("broken")["message"]
    assert jobs.pods("broken") == []
    wait_for(lambda: len(jobs.pods("fine")) == 3, "the other job isn't disturbed")


def test_what_keeps_pods_from_starting_is_in_the_jobs_condition(operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.apply("large")
    one = {"nodes": {"max": 1}, "capacity": {"onDemand": {"min": 1}}, "resources": {"limits": {}}}
    key = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "gone", "key": "key"}}}
    jobs.apply("no-secret", env=[key], **one)

    def says(name: str, reason: str) -> bool:
        return bool(jobs.condition(name, "PodsHealthy")["reason"] == reason)

    wait_for(lambda: says("no-secret", "CreateContainerConfigError"), f"the secret is missed\n{operator.log()}")
    assert 'secret "gone" not found' in jobs.condition("no-secret", "PodsHealthy")["message"]
    wait_for(lambda: says("large", "Unschedulable"), f"no node is large enough\n{operator.log()}")
    message = jobs.condition("large", "PodsHealthy")["message"]
    assert "Insufficient nvidia.com/gpu" in message
    assert "Lower processesPerNode or resources if no node is that large" in message


@pytest.fixture
def newer_crd(kubectl: Kubectl, namespace: str) -> Iterator[None]:
    """The CRD of a newer version, whose spec has one more field."""
    [file] = CRDS.glob("*.yaml")
    crd = yaml.safe_load(file.read_text())
    [version] = crd["spec"]["versions"]
    version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["colour"] = {"type": "string"}
    kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(crd))
    yield
    kubectl("apply", "--server-side", "-f", str(CRDS))


def test_an_operator_that_is_older_than_the_crd_disturbs_no_job_that_has_begun(
    operator: OperatorProcess, jobs: Jobs, kubectl: Kubectl, newer_crd: None
) -> None:
    def patch(name: str, content: Any) -> bool:
        merge = ("--type=merge", "-p", json.dumps(content))
        return kubectl.run("patch", "tj", name, "-n", jobs.namespace, *merge).returncode == 0

    def condition(name: str) -> dict[str, Any]:
        return jobs.condition(name, "SpecNotUnderstood")

    jobs.apply("begun")
    wait_for(lambda: len(jobs.pods("begun")) == 3, f"three pods\n{operator.log()}")
    jobs.has_run("begun")
    before = {pod["metadata"]["uid"] for pod in jobs.pods("begun")}

    red = {"spec": {"colour": "red"}}
    wait_for(lambda: patch("begun", red) and condition("begun")["status"] == "True", f"it is told\n{operator.log()}")
    assert "doesn't understand spec.colour, which a newer version" in condition("begun")["message"]
    kubectl("delete", "pod", "begun-1", "-n", jobs.namespace, "--grace-period=0", "--force")
    wait_for(lambda: len(jobs.pods("begun")) == 3, "the deleted pod is replaced")
    assert len({pod["metadata"]["uid"] for pod in jobs.pods("begun")} & before) == 2
    assert (jobs.status("begun")["phase"], jobs.status("begun")["generation"]["number"]) == ("Pending", 4)

    jobs.apply("new", colour="red")
    wait_for(lambda: condition("new")["status"] == "True", "the new job is told, too")
    assert (jobs.pods("new"), jobs.status("new")["phase"]) == ([], "Pending")
    assert "The job waits until then" in jobs.status("new")["message"]
    assert patch("new", {"spec": {"colour": None}})
    wait_for(lambda: len(jobs.pods("new")) == 3, "it begins once it is understood")
    assert condition("new")["status"] == "False"


@pytest.fixture
def no_pods(kubectl: Kubectl, namespace: str) -> Iterator[None]:
    """An admission policy that answers 422 to every pod of the namespace."""
    name, kind = f"no-pods-{namespace}", "ValidatingAdmissionPolicy"
    rule = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["pods", "serviceaccounts"],
    }
    denial = {"expression": "false", "message": "no pods on Sundays", "reason": "Invalid"}
    selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    binding = {"policyName": name, "validationActions": ["Deny"], "matchResources": {"namespaceSelector": selector}}
    specs = {
        kind: {"matchConstraints": {"resourceRules": [rule]}, "validations": [denial]},
        f"{kind}Binding": binding,
    }
    api = "admissionregistration.k8s.io/v1"
    objects = [{"apiVersion": api, "kind": k, "metadata": {"name": name}, "spec": spec} for k, spec in specs.items()]
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))
    probe = ("create", "serviceaccount", "probe", "-n", namespace, "--dry-run=server")
    wait_for(lambda: "no pods on Sundays" in kubectl.run(*probe).stderr, "the policy is in force")
    yield
    kubectl("delete", f"{kind},{kind}Binding", name)


def test_a_replacement_that_is_refused_takes_no_pod_of_a_job_that_has_run(
    operator: OperatorProcess, jobs: Jobs, kubectl: Kubectl, request: pytest.FixtureRequest
) -> None:
    jobs.apply("gpt")
    wait_for(lambda: len(jobs.pods("gpt")) == 3, f"three pods\n{operator.log()}")
    jobs.has_run("gpt")
    request.getfixturevalue("no_pods")
    kubectl("delete", "pod", "gpt-1", "-n", jobs.namespace, "--grace-period=0", "--force")
    wait_for(lambda: jobs.condition("gpt", "PodsHealthy")["reason"] == "PodsRefused", f"it is told\n{operator.log()}")
    assert "no pods on Sundays" in jobs.condition("gpt", "PodsHealthy")["message"]
    assert jobs.status("gpt")["phase"] == "Pending"
    assert [pod["metadata"]["name"] for pod in jobs.pods("gpt")] == ["gpt-2", "gpt-3"]


def test_suspend_and_resume(operator: OperatorProcess, jobs: Jobs, kubectl: Kubectl) -> None:
    jobs.apply("gpt")
    wait_for(lambda: len(jobs.pods("gpt")) == 3, "three pods")

    def suspend(value: bool) -> None:
        patch = json.dumps({"spec": {"runPolicy": {"suspend": value}}})
        kubectl("patch", "tj", "gpt", "-n", jobs.namespace, "--type=merge", "-p", patch)

    suspend(True)
    wait_for(lambda: jobs.status("gpt").get("phase") == "Suspended" and not jobs.pods("gpt"), "suspended")
    suspend(False)
    wait_for(lambda: len(jobs.pods("gpt")) == 3, "resumed")


def test_of_two_jobs_at_one_checkpoint_uri_the_younger_waits(
    operator: OperatorProcess, jobs: Jobs, kubectl: Kubectl
) -> None:
    uri = f"s3://checkpoints/{jobs.namespace}/shared"
    jobs.apply("older", checkpoint={"uri": uri})
    created = kubectl.get("tj", "older", jobs.namespace)["metadata"]["creationTimestamp"]
    wait_for(lambda: len(jobs.pods("older")) == 3, f"its pods\n{operator.log()}")
    wait_for(lambda: f"{datetime.now(UTC):%FT%TZ}" > created, "the next second: two jobs of one aren't ordered")
    jobs.apply("younger", checkpoint={"uri": f"{uri}/"})
    wait_for(lambda: "older, which comes first" in jobs.status("younger").get("message", ""), "it says why it waits")
    assert [len(jobs.pods(name)) for name in ("older", "younger")] == [3, 0]
    kubectl("delete", "tj", "older", "-n", jobs.namespace)
    wait_for(lambda: len(jobs.pods("younger")) == 3, f"it goes on by itself\n{operator.log()}")


@contextmanager
def watcher(kubectl: Kubectl, pod: Any, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m spottrain_watcher` on the node of `pod`.

    It may do anything in the cluster.
    """
    namespace = pod["metadata"]["namespace"]
    account = ("--clusterrole=cluster-admin", f"--serviceaccount={namespace}:default")
    kubectl("create", "clusterrolebinding", namespace, *account)
    [cluster] = yaml.safe_load(kubectl.kubeconfig.read_text())["clusters"]
    server = urllib.parse.urlparse(cluster["cluster"]["server"])
    (folder / "token").write_text(kubectl("create", "token", "default", "-n", namespace))
    (folder / "ca.crt").write_bytes(base64.b64decode(cluster["cluster"]["certificate-authority-data"]))
    env = dict(os.environ) | {
        "KUBERNETES_SERVICE_HOST": str(server.hostname),
        "KUBERNETES_SERVICE_PORT": str(server.port),
        "SPOTTRAIN_SERVICEACCOUNT_DIR": str(folder),
        "SPOTTRAIN_NODE_NAME": pod["spec"]["nodeName"],
        "SPOTTRAIN_HOST_IP": pod["status"]["hostIP"],
        "SPOTTRAIN_PROVIDER": "other",
    }
    log = (folder / "watcher.log").open("ab")
    process = subprocess.Popen([sys.executable, "-m", "spottrain_watcher"], env=env, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
        kubectl("delete", "clusterrolebinding", namespace)


def test_a_spot_node_that_nobody_watches_is_in_the_jobs_condition_until_somebody_does(
    operator: OperatorProcess, jobs: Jobs, kubectl: Kubectl, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(600)\n")
    one_spot_node = {"nodes": {"max": 1}, "capacity": {"spot": {"max": 1}}, "resources": {"limits": {}}}
    jobs.apply("unheard", entrypoint={"script": str(script)}, **one_spot_node)

    def notices() -> dict[str, Any]:
        return jobs.condition("unheard", "NoticesHeard")

    wait_for(lambda: notices()["reason"] == "WatcherMissing", f"nobody watches\n{operator.log()}", seconds=120)
    [pod] = jobs.pods("unheard")
    assert notices()["status"] == "False"
    assert f"No watcher answers on {pod['spec']['nodeName']}: a preemption" in notices()["message"]
    unwatched = b'spottrain_job_unwatched_members{job_name="unheard"'
    wait_for(lambda: unwatched in operator.get("/metrics")[1], "the metric has it")
    generation = jobs.status("unheard")["generation"]
    assert (generation["state"], generation["number"]) == ("Active", 1), "no generation ends for it"
    events = [each["reason"] for each in kubectl.list("events", jobs.namespace)]
    assert events.count("WatcherMissing") == 1
    annotations = pod["metadata"]["annotations"]
    assert annotations["karpenter.sh/do-not-disrupt"] == "true"
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    with watcher(kubectl, pod, tmp_path):
        wait_for(lambda: notices()["status"] == "True", f"somebody watches\n{operator.log()}")
        assert notices()["reason"] == "Heard"
