"""The operator as a process against a real control plane.

Jobs become pods, the operator gets the agents' reports, and it survives crashes.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ports import free_ports

from cluster_api import refusal
from cluster_fixtures import Kubectl, wait_for
from operator_process import Jobs, OperatorProcess, led_namespace, running, watcher
from spottrain_api.contract.assignments import AgentReport, Assignment, AssignmentAction
from spottrain_api.contract.names import ANNOTATION_CONTROL_CA, ANNOTATION_CONTROL_URL
from spottrain_local.cluster import Cluster
from spottrain_operator.control_api.certificate_keeper import SECRET_NAME
from spottrain_runtime.logs import ENV_LOG_FORMAT

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def operator_of_all(local_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    with running(Kubectl(kubeconfig=local_cluster.kubeconfig), tmp_path_factory.mktemp("operator")) as process:
        yield process


@pytest.fixture
def operator(operator_of_all: OperatorProcess) -> OperatorProcess:
    """An operator that runs, and has been running since the first test, but for those that end it."""
    if not operator_of_all.runs():
        operator_of_all.start()
    operator_of_all.wait_ready()
    return operator_of_all


@pytest.fixture
def jobs(kubectl: Kubectl, operator: OperatorProcess) -> Iterator[Jobs]:
    """The jobs of a namespace of the test's own, which the operator leads."""
    with led_namespace(operator) as namespace:
        yield Jobs(kubectl, namespace)


def test_a_job_becomes_restricted_pods_on_both_kinds_of_capacity(operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.apply("gpt")
    wait_for(lambda: jobs.capacity("gpt") == ["on-demand", "spot", "spot"], "three pods")
    assert jobs.status("gpt")["phase"] == "Pending"
    assert jobs.annotations("gpt", ANNOTATION_CONTROL_URL) == {operator.url}
    assert jobs.annotations("gpt", ANNOTATION_CONTROL_CA) == {operator.authority()}
    wait_for(lambda: b'spottrain_job_phase{job_name="gpt"' in operator.metrics(), "it has metrics")
    jobs.delete("gpt")
    wait_for(lambda: not jobs.pods("gpt"), "the job's pods go with it")
    wait_for(lambda: b'job="gpt"' not in operator.metrics(), "its metrics go too")


def token_of(jobs: Jobs, pod: Any, audience: str = "spottrain") -> str:
    return jobs.kubectl.token("default", jobs.namespace, audience=audience, pod=pod["name"], uid=pod["uid"])


def test_an_agent_reports_and_gets_its_assignment(operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.apply("gpt")
    wait_for(lambda: len(jobs.pods("gpt")) == 3, "three pods")
    pod = jobs.pods("gpt")[0]["metadata"]
    token = token_of(jobs, pod)
    wait_for(lambda: operator.get("/v1/assignment", token)[0] == 200, "the operator knows the pod")
    _, body = operator.get("/v1/assignment", token)
    assert Assignment.from_json(body).action is AssignmentAction.WAIT
    report = AgentReport(pod=pod["name"], pod_uid=pod["uid"], rendezvous_port=1, sent_at=datetime.now(UTC))
    assert operator.request("/v1/report", report.to_json().encode(), token)[0] == 204
    another = report.model_copy(update={"pod": jobs.pods("gpt")[1]["metadata"]["name"]})
    assert operator.request("/v1/report", another.to_json().encode(), token)[0] == 403
    assert operator.get("/v1/assignment", "stolen")[0] == 401
    assert b"for the audience 'vault'" in operator.get("/v1/assignment", token_of(jobs, pod, "vault"))[1]
    stranger = {"name": "mine", "uid": created_pod(jobs, "mine")}
    status, sentence = operator.get("/v1/assignment", token_of(jobs, stranger))
    assert (status, b"the operator has no pod mine" in sentence) == (403, True)
    jobs.lose(pod["name"])
    wait_for(lambda: operator.get("/v1/assignment", token)[0] == 403, "the token of a deleted pod is refused")


def created_pod(jobs: Jobs, name: str) -> str:
    """The uid of a pod that the operator did not make."""
    container = {"name": "c", "image": "local/none", "resources": {"limits": {"nvidia.com/gpu": "64"}}}
    rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    security = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"containers": [container | {"securityContext": rights}], "securityContext": security}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    return str(jobs.kubectl.create(pod, jobs.namespace)["metadata"]["uid"])


def test_a_new_port_and_a_new_authority_reach_the_pods_that_run(operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.apply("gpt")
    wait_for(lambda: len(jobs.pods("gpt")) == 3, "three pods")
    before, authority = {pod["metadata"]["uid"] for pod in jobs.pods("gpt")}, operator.authority()
    operator.end(signal.SIGTERM)
    operator.start()
    operator.wait_ready()
    assert operator.authority() == authority, "it outlives the operator"
    operator.end(signal.SIGTERM)
    jobs.kubectl.delete("secret", SECRET_NAME, operator.namespace)
    (operator.port,) = free_ports(1)
    operator.start()
    operator.wait_ready()
    wait_for(lambda: jobs.annotations("gpt", ANNOTATION_CONTROL_URL) == {operator.url}, "they know the new port")
    assert operator.authority() != authority
    assert jobs.annotations("gpt", ANNOTATION_CONTROL_CA) == {operator.authority()}
    assert {pod["metadata"]["uid"] for pod in jobs.pods("gpt")} == before
    assert operator.get("/healthz")[0] == 200


def test_a_killed_operator_comes_back_in_seconds_and_doubles_nothing(operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.apply("gpt")
    wait_for(lambda: len(jobs.pods("gpt")) == 3, "three pods")
    before = {pod["metadata"]["uid"] for pod in jobs.pods("gpt")}
    operator.end(signal.SIGKILL)
    jobs.lose("gpt-1")
    operator.start()
    operator.wait_ready()
    wait_for(lambda: len(jobs.pods("gpt")) == 3, "the deleted pod is replaced")
    assert len({pod["metadata"]["uid"] for pod in jobs.pods("gpt")} & before) == 2


def test_a_job_of_a_namespace_that_is_not_watched_is_left_alone(operator: OperatorProcess, jobs: Jobs) -> None:
    other = Jobs(jobs.kubectl, f"{jobs.namespace}-other")
    other.kubectl.create_namespace(other.namespace)
    try:
        other.apply("theirs")
        jobs.apply("mine")
        wait_for(lambda: jobs.pods("mine"), "its own job has pods")
        assert other.status("theirs") == {}
        assert other.pods("theirs") == []
    finally:
        other.kubectl.delete("namespace", other.namespace)


def test_sigterm_ends_it_and_frees_the_lease(operator: OperatorProcess) -> None:
    assert operator.end(signal.SIGTERM) == 0, operator.log()
    lease = operator.kubectl.get("lease", "spottrain-operator", operator.namespace)
    assert not lease["spec"].get("holderIdentity")
    operator.start(identity="operator-1")
    operator.wait_ready()


def test_pods_that_kubernetes_refuses_fail_the_job_with_a_sentence(operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.apply("broken", podTemplate={"imagePullPolicy": "nowhere"})
    jobs.apply("fine")
    wait_for(lambda: jobs.status("broken").get("phase") == "Failed", "the job fails")
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

    wait_for(lambda: says("no-secret", "CreateContainerConfigError"), "the secret is missed")
    assert 'secret "gone" not found' in jobs.condition("no-secret", "PodsHealthy")["message"]
    wait_for(lambda: says("large", "Unschedulable"), "no node is large enough")
    message = jobs.condition("large", "PodsHealthy")["message"]
    assert "Insufficient nvidia.com/gpu" in message
    assert "Lower processesPerNode or resources if no node is that large" in message


@pytest.fixture
def no_pods(kubectl: Kubectl, jobs: Jobs) -> Iterator[None]:
    """An admission policy that answers 422 to every pod of the namespace."""
    name, kind = f"no-pods-{jobs.namespace}", "ValidatingAdmissionPolicy"
    rule = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["pods", "serviceaccounts"],
    }
    denial = {"expression": "false", "message": "no pods on Sundays", "reason": "Invalid"}
    selector = {"matchLabels": {"kubernetes.io/metadata.name": jobs.namespace}}
    binding = {"policyName": name, "validationActions": ["Deny"], "matchResources": {"namespaceSelector": selector}}
    specs = {
        kind: {"matchConstraints": {"resourceRules": [rule]}, "validations": [denial]},
        f"{kind}Binding": binding,
    }
    api = "admissionregistration.k8s.io/v1"
    objects = [{"apiVersion": api, "kind": k, "metadata": {"name": name}, "spec": spec} for k, spec in specs.items()]
    for each in objects:
        kubectl.create(each)
    probe = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "probe"}}

    def denies() -> bool:
        return "no pods on Sundays" in refusal(lambda: kubectl.create(probe, jobs.namespace, kept=False))

    wait_for(denies, "the policy is in force")
    yield
    for part in specs:
        kubectl.delete(part, name)


def test_a_replacement_that_is_refused_takes_no_pod_of_a_job_that_has_run(
    operator: OperatorProcess, jobs: Jobs, request: pytest.FixtureRequest
) -> None:
    jobs.apply("gpt")
    wait_for(lambda: len(jobs.pods("gpt")) == 3, "three pods")
    jobs.has_run("gpt")
    request.getfixturevalue("no_pods")
    jobs.lose("gpt-1")
    wait_for(lambda: jobs.condition("gpt", "PodsHealthy")["reason"] == "PodsRefused", "it is told")
    assert "no pods on Sundays" in jobs.condition("gpt", "PodsHealthy")["message"]
    assert jobs.status("gpt")["phase"] == "Pending"
    assert [pod["metadata"]["name"] for pod in jobs.pods("gpt")] == ["gpt-2", "gpt-3"]


def test_a_quota_of_zero_holds_pods_back_until_it_is_raised(
    operator: OperatorProcess, jobs: Jobs, kubectl: Kubectl
) -> None:
    def limit(most: int) -> None:
        quota = {"kind": "ResourceQuota", "metadata": {"name": "team"}, "spec": {"hard": {"pods": str(most)}}}
        kubectl.apply({"apiVersion": "v1", **quota}, jobs.namespace)
        wait_for(lambda: counted() == str(most), "the quota is in force")

    def counted() -> Any:
        return kubectl.get("resourcequota", "team", jobs.namespace).get("status", {}).get("hard", {}).get("pods")

    limit(0)
    jobs.apply("gpt")
    advice = "limited: pods=0. Raise the quota, or lower nodes.min"
    wait_for(lambda: advice in jobs.status("gpt").get("message", ""), "it says so")
    limit(10)
    wait_for(lambda: len(jobs.pods("gpt")) == 3, "three pods")
    jobs.has_run("gpt")
    limit(0)
    lost, *others = (pod["metadata"]["name"] for pod in jobs.pods("gpt"))
    jobs.lose(lost)
    wait_for(lambda: advice in jobs.condition("gpt", "PodsHealthy").get("message", ""), "the replacement is refused")
    assert [pod["metadata"]["name"] for pod in jobs.pods("gpt")] == others
    limit(10)
    wait_for(lambda: len(jobs.pods("gpt")) == 3, "it's replaced")
    assert "Traceback" not in operator.log()


def test_a_namespace_that_is_being_deleted_disturbs_no_other(
    operator: OperatorProcess, jobs: Jobs, kubectl: Kubectl
) -> None:
    before = len(operator.log())

    def hold(*finalizers: str) -> None:
        """Keep the job, and with it the namespace, until nothing holds it."""
        kubectl.patch("tj", "gpt", {"metadata": {"finalizers": finalizers}}, going.namespace)

    with led_namespace(operator) as name:
        going = Jobs(kubectl, name)
        going.apply("gpt")
        wait_for(lambda: len(going.pods("gpt")) == 3, "three pods")
        going.has_run("gpt")
        hold("example.com/test")
    wait_for(lambda: not going.pods("gpt"), "its pods go")
    jobs.apply("gpt")
    wait_for(lambda: len(jobs.pods("gpt")) == 3, "pods in the other namespace")
    assert not going.pods("gpt")
    hold()
    wait_for(lambda: not kubectl.has("namespace", going.namespace), "the namespace goes")
    wait_for(lambda: b'namespace="' + going.namespace.encode() not in operator.metrics(), "and its metrics")
    log = operator.log()[before:]
    assert "Traceback" not in log
    assert log.count("being terminated") < 20, "nothing is tried again and again"


def test_a_job_that_is_nested_deeply_hides_no_other(
    operator: OperatorProcess, jobs: Jobs, kubectl: Kubectl, tmp_path: Path
) -> None:
    levels = 300
    jobs.apply("good")
    wait_for(lambda: len(jobs.pods("good")) == 3, "three pods")
    job = kubectl.get("tj", "good", jobs.namespace)
    job["metadata"] = {"name": "deep", "namespace": jobs.namespace}
    job["spec"] |= {"strategy": "deepspeed", "deepspeed": {"config": "@"}}
    job["spec"]["checkpoint"]["uri"] += "-deep"
    file = tmp_path / "deep.json"
    file.write_text(json.dumps(job).replace('"@"', '{"a":' * levels + "1" + "}" * levels))
    path = f"/apis/spottrain.dev/v1alpha1/namespaces/{jobs.namespace}/trainingjobs"
    kubectl("create", "--raw", path, "-f", str(file))
    jobs.apply("new")
    wait_for(lambda: len(jobs.pods("new")) == 3, "pods of a new job", 60.0)
    wait_for(lambda: "or 50 levels" in operator.log(), "the deep job is reported")
    jobs.delete("good")
    wait_for(lambda: not jobs.pods("good"), "its pods go")
    operator.end(signal.SIGTERM)
    operator.start()
    operator.wait_ready()
    jobs.apply("newer")
    wait_for(lambda: len(jobs.pods("newer")) == 3, "pods after a restart", 60.0)


def test_suspend_and_resume(operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.apply("gpt")
    wait_for(lambda: len(jobs.pods("gpt")) == 3, "three pods")
    jobs.edit("gpt", runPolicy={"suspend": True})
    wait_for(lambda: jobs.status("gpt").get("phase") == "Suspended" and not jobs.pods("gpt"), "suspended")
    jobs.edit("gpt", runPolicy={"suspend": False})
    wait_for(lambda: len(jobs.pods("gpt")) == 3, "resumed")


def test_of_two_jobs_at_one_checkpoint_uri_the_younger_waits(
    operator: OperatorProcess, jobs: Jobs, kubectl: Kubectl
) -> None:
    uri = f"s3://checkpoints/{jobs.namespace}/shared"
    jobs.apply("older", checkpoint={"uri": uri})
    created = kubectl.get("tj", "older", jobs.namespace)["metadata"]["creationTimestamp"]
    wait_for(lambda: len(jobs.pods("older")) == 3, "its pods")
    wait_for(lambda: f"{datetime.now(UTC):%FT%TZ}" > created, "the next second: two jobs of one aren't ordered")
    jobs.apply("younger", checkpoint={"uri": f"{uri}/"})
    wait_for(lambda: "older, which comes first" in jobs.status("younger").get("message", ""), "it says why it waits")
    assert [len(jobs.pods(name)) for name in ("older", "younger")] == [3, 0]
    jobs.delete("older")
    wait_for(lambda: len(jobs.pods("younger")) == 3, "it goes on by itself")


@pytest.fixture
def operator_with_json(
    kubectl: Kubectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OperatorProcess]:
    """An operator that logs JSON, and with it the agents of its pods."""
    monkeypatch.setenv(ENV_LOG_FORMAT, "json")
    with running(kubectl, tmp_path) as process:
        yield process


@pytest.fixture
def jobs_with_json(kubectl: Kubectl, operator_with_json: OperatorProcess) -> Iterator[Jobs]:
    with led_namespace(operator_with_json) as namespace:
        yield Jobs(kubectl, namespace)


def test_a_spot_node_that_nobody_watches_is_in_the_jobs_condition_until_somebody_does(
    operator_with_json: OperatorProcess, jobs_with_json: Jobs, kubectl: Kubectl, tmp_path: Path
) -> None:
    operator, jobs = operator_with_json, jobs_with_json
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(600)\n")
    one_spot_node = {"nodes": {"max": 1}, "capacity": {"spot": {"max": 1}}, "resources": {"limits": {}}}
    jobs.apply("unheard", entrypoint={"script": str(script)}, **one_spot_node)

    def notices() -> dict[str, Any]:
        return jobs.condition("unheard", "NoticesHeard")

    wait_for(lambda: notices()["reason"] == "WatcherMissing", "nobody watches", seconds=120)
    [pod] = jobs.pods("unheard")
    assert notices()["status"] == "False"
    assert f"No watcher answers on {pod['spec']['nodeName']}: a preemption" in notices()["message"]
    unwatched = b'spottrain_job_unwatched_members{job_name="unheard"'
    wait_for(lambda: unwatched in operator.metrics(), "the metric has it")
    generation = jobs.status("unheard")["generation"]
    assert (generation["state"], generation["number"]) == ("Active", 1), "no generation ends for it"
    events = [each["reason"] for each in kubectl.list("events", jobs.namespace)]
    assert events.count("WatcherMissing") == 1
    protected = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}

    def annotations() -> dict[str, str]:
        [member] = jobs.pods("unheard")
        return dict(member["metadata"]["annotations"])

    wait_for(lambda: protected.items() <= annotations().items(), "autoscalers leave the node alone")
    with watcher(kubectl, pod, tmp_path):
        wait_for(lambda: notices()["status"] == "True", "somebody watches")
        assert notices()["reason"] == "KubernetesOnly"
        assert f"On {pod['spec']['nodeName']} the watcher knows no cloud" in notices()["message"]

    lines = [json.loads(line) for line in operator.log().splitlines()]
    told = [line for line in lines if line.get("job")]
    assert {(line["namespace"], line["job"]) for line in told} == {(jobs.namespace, "unheard")}
    [missing] = [line for line in told if ": WatcherMissing: " in line["message"]]
    assert (missing["level"], missing["generation"]) == ("WARNING", 1)
    log = jobs.kubectl("logs", "unheard-1", "-n", jobs.namespace)
    agents = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    about = {(line["namespace"], line["job"], line["member"]) for line in agents}
    assert about == {(jobs.namespace, "unheard", "unheard-1")}
    assert [line["generation"] for line in agents if ": torchrun " in line["message"]] == [1]
