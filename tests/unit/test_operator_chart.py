"""The chart installs what the code expects, with no more rights than it needs."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
import yaml
from click.testing import CliRunner

from rendered_objects import objects_in
from spottrain_api import crd
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.names import (
    ANNOTATION_WATCHED,
    CONTROL_PORT,
    ENV_CONTROL_URL,
    ENV_HOST_IP,
    ENV_NODE_NAME,
    ENV_WATCHER_PORT,
    HEALTH_PORT,
    LABEL_LEADER,
    METRICS_PORT,
)
from spottrain_api.contract.nodes import EKS_TEMPLATE_CAPACITY_TYPE, SPOT_LABELS
from spottrain_api.v1alpha1.capacity import PoolType
from spottrain_api.v1alpha1.profile import DEFAULT_PROFILE, PROFILE_KIND
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_local.install import find_helm
from spottrain_operator.command import main
from spottrain_operator.control_api.certificate_keeper import SECRET_NAME
from spottrain_operator.kube.lease import LeaseSettings
from spottrain_operator.kube.scope import Scope
from spottrain_operator.objects.placement import TEMPLATES, TERMS, Site, node_affinity
from spottrain_operator.rights import KARPENTER_RIGHTS, KUEUE_RIGHTS, POD_GROUP_RIGHTS, RIGHTS, Right
from spottrain_operator.selfcheck import main as selfcheck

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "spottrain"
FORBIDDEN_VERBS = {"*", "escalate", "bind", "impersonate"}
FORBIDDEN_RESOURCES = {"*", "secrets", "nodes/proxy", "serviceaccounts/token"}
# The one Secret that a part may read.
CONTROL_SECRET = {
    "apiGroups": [""],
    "resources": ["secrets"],
    "resourceNames": [SECRET_NAME],
    "verbs": ["get", "update"],
}


def test_the_watcher_runs_on_the_nodes_that_spot_pods_go_to() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    required = values["watcher"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    of_chart = [term["matchExpressions"] for term in required["nodeSelectorTerms"]]
    known = (*TERMS.items(), *TEMPLATES.items())
    of_code = [list(term) for (_, kind), terms in known if kind is PoolType.SPOT for term in terms]
    assert sorted(of_chart, key=str) == sorted(of_code, key=str)


def render(*values: str, crds: bool = False) -> list[dict[str, Any]]:
    """What the release consists of. Its CRDs are most of it, and take half the time."""
    command = [find_helm(), "template", "spottrain", str(CHART), "-n", "spottrain-system"]
    with_crds = ["--set", f"crds.enabled={str(crds).lower()}"]
    done = subprocess.run([*command, *with_crds, *values], capture_output=True, text=True, check=True, timeout=60)
    return objects_in(done.stdout)


@pytest.fixture(scope="module")
def rendered() -> list[dict[str, Any]]:
    return render("--values", str(CHART / "values.local.yaml"), "--set", "podMonitor.enabled=true", crds=True)


def one(rendered: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    [found] = [each for each in rendered if each["kind"] == kind]
    return found


@pytest.mark.cluster
def test_the_release_installs_the_crds_of_this_version_and_leaves_them_behind(rendered: list[dict[str, Any]]) -> None:
    installed = {each["metadata"]["name"]: each for each in rendered if each["kind"] == "CustomResourceDefinition"}
    assert installed == crd.definitions()
    for each in installed.values():
        assert each["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert "CustomResourceDefinition" not in {each["kind"] for each in render()}


@pytest.mark.cluster
def test_no_role_has_wildcards_or_ways_to_more_rights(rendered: list[dict[str, Any]]) -> None:
    roles = [each for each in rendered if each["kind"] in ("Role", "ClusterRole")]
    assert len(roles) == 6
    for role in roles:
        for rule in role["rules"]:
            if role["kind"] == "Role" and rule == CONTROL_SECRET:
                continue
            assert not FORBIDDEN_VERBS & set(rule["verbs"]), role["metadata"]["name"]
            if paths := rule.get("nonResourceURLs"):
                assert not any("*" in path for path in paths)
                continue
            assert not FORBIDDEN_RESOURCES & set(rule["resources"]), role["metadata"]["name"]
            assert "*" not in rule["apiGroups"]


@pytest.mark.cluster
@pytest.mark.parametrize("part", RIGHTS)
def test_the_roles_grant_the_rights_that_the_code_asks_for(rendered: list[dict[str, Any]], part: str) -> None:
    assert granted_to(part, rendered) == {sorted_verbs(right) for right in RIGHTS[part]}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("value", "option", "rights"),
    [
        ("kueue.enabled", "kueue", KUEUE_RIGHTS),
        ("karpenter.enabled", "karpenter", KARPENTER_RIGHTS),
        ("jobs.podGroups", "pod_groups", POD_GROUP_RIGHTS),
    ],
)
def test_the_operator_has_rights_on_others_objects_only_if_it_uses_them(
    value: str, option: str, rights: tuple[Right, ...], enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = render("--set", f"{value}={str(enabled).lower()}")
    more = rights if enabled else ()
    assert granted_to("operator", objects) == {sorted_verbs(right) for right in (*RIGHTS["operator"], *more)}
    [deployment] = [each for each in objects if each["kind"] == "Deployment"]
    for variable in deployment["spec"]["template"]["spec"]["containers"][0]["env"]:
        if "value" in variable:
            monkeypatch.setenv(variable["name"], variable["value"])
    assert main.make_context("operator", []).params[option] is enabled


def sorted_verbs(right: Right) -> Right:
    return replace(right, verbs=tuple(sorted(right.verbs)))


def granted_to(part: str, objects: list[dict[str, Any]]) -> set[Right]:
    """What the roles of a part grant."""
    roles = {f"spottrain-{part}", f"spottrain-{part}-lease", f"spottrain-{part}-jobs"}
    return {
        Right(
            group=group,
            resource=resource,
            path=path,
            verbs=tuple(sorted(rule["verbs"])),
            name=name,
            of_jobs=role["metadata"]["name"].endswith("-jobs"),
            own_namespace=role["kind"] == "Role",
        )
        for role in objects
        if role["kind"] in ("Role", "ClusterRole") and role["metadata"]["name"] in roles
        for rule in role["rules"]
        for group in rule.get("apiGroups", [""])
        for resource in rule.get("resources", [""])
        for path in rule.get("nonResourceURLs", [""])
        for name in rule.get("resourceNames", [""])
    }


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["Deployment", "DaemonSet"])
def test_containers_are_restricted(rendered: list[dict[str, Any]], kind: str) -> None:
    pod = one(rendered, kind)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    [container] = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.cluster
def test_the_operator_gets_the_address_of_its_service(rendered: list[dict[str, Any]]) -> None:
    service = one(rendered, "Service")
    deployment = one(rendered, "Deployment")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    env = {each["name"]: each for each in container["env"]}
    name = service["metadata"]["name"]
    assert env[ENV_CONTROL_URL]["value"] == f"https://{name}.spottrain-system.svc:{CONTROL_PORT}"
    assert [each["port"] for each in service["spec"]["ports"]] == [CONTROL_PORT]
    assert {each["containerPort"] for each in container["ports"]} == {CONTROL_PORT, HEALTH_PORT, METRICS_PORT}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selector = service["spec"]["selector"]
    assert selector.pop(LABEL_LEADER) == "true"
    assert selector.items() <= labels.items()
    command = ["--control-url", "https://a", "--pod-labels", env["SPOTTRAIN_POD_LABELS"]["value"]]
    assert main.make_context("operator", command).params["pod_labels"] == selector
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.cluster
def test_the_certificate_is_the_operators_own_or_cert_managers(rendered: list[dict[str, Any]]) -> None:
    secret = one(rendered, "Secret")
    assert (secret["metadata"]["name"], "data" in secret) == (SECRET_NAME, False)
    [container] = one(rendered, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert env_of(container)["SPOTTRAIN_CERTIFICATE_FROM"] == "operator"

    objects = render(
        "--set", "operator.certificateIssuer.kind=ClusterIssuer,operator.certificateIssuer.name=internal"
    )
    certificate = one(objects, "Certificate")["spec"]
    assert "Secret" not in {each["kind"] for each in objects}
    assert certificate["secretName"] == SECRET_NAME
    assert certificate["issuerRef"] == {"kind": "ClusterIssuer", "name": "internal"}
    [container] = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert env_of(container)["SPOTTRAIN_CERTIFICATE_FROM"] == "secret"
    assert certificate["dnsNames"] == [urlsplit(env_of(container)[ENV_CONTROL_URL]).hostname]


@pytest.mark.cluster
def test_metrics_ask_for_the_token_of_a_secret_if_there_is_one() -> None:
    objects = render("--set", "podMonitor.enabled=true,operator.metricsTokenSecret=scrape")
    pod = one(objects, "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    [volume], [mount] = pod["volumes"], container["volumeMounts"]
    assert (volume["name"], volume["secret"]) == (mount["name"], {"secretName": "scrape"})
    assert env_of(container)["SPOTTRAIN_METRICS_TOKEN_FILE"] == f"{mount['mountPath']}/token"
    [endpoint] = [
        endpoint
        for each in objects
        if each["kind"] == "PodMonitor" and each["metadata"]["name"] == "spottrain-operator"
        for endpoint in each["spec"]["podMetricsEndpoints"]
    ]
    assert (endpoint["port"], endpoint["scheme"]) == ("metrics", "https")
    assert endpoint["tlsConfig"]["ca"]["secret"] == {"name": SECRET_NAME, "key": "ca.crt"}
    assert endpoint["authorization"]["credentials"] == {"name": "scrape", "key": "token"}


@pytest.mark.parametrize("address", ["http://a:8080", "a:8443", "https://", ""])
def test_the_operator_serves_no_address_without_tls(address: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is not the address of a server with TLS\. Write it"):
        main.make_context("operator", ["--control-url", address])


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("settings", "allowed"),
    [((), set()), (("jobs.allowedNetworks={efa,tcpx}",), {"efa", "tcpx"})],
    ids=["none", "two"],
)
def test_the_operator_allows_the_networks_of_the_chart(
    settings: tuple[str, ...], allowed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = render(*(part for each in settings for part in ("--set", each)))
    [container] = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    for each in container["env"]:
        if "value" in each:
            monkeypatch.setenv(each["name"], each["value"])
    assert set(main.make_context("operator", []).params["allowed_networks"]) == allowed
    monkeypatch.setenv("SPOTTRAIN_ALLOWED_NETWORKS", "efa pigeon")
    with pytest.raises(click.BadParameter, match="'pigeon' is not one of 'efa', 'infiniband', 'tcpx'"):
        main.make_context("operator", [])


@pytest.mark.cluster
@pytest.mark.parametrize("replicas", [1, 2])
def test_one_of_several_replicas_may_be_evicted_at_a_time(replicas: int) -> None:
    objects = render("--set", f"operator.replicas={replicas}")
    budgets = [each["spec"] for each in objects if each["kind"] == "PodDisruptionBudget"]
    assert len(budgets) == (replicas > 1), "one alone would never let its node go"
    selector = one(objects, "Deployment")["spec"]["selector"]
    for budget in budgets:
        assert (budget["maxUnavailable"], budget["selector"]) == (1, selector)


@pytest.mark.cluster
def test_replicas_prefer_different_nodes_and_zones(rendered: list[dict[str, Any]]) -> None:
    deployment = one(rendered, "Deployment")["spec"]
    spread = {each.pop("topologyKey"): each for each in deployment["template"]["spec"]["topologySpreadConstraints"]}
    expected = {"maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": deployment["selector"]}
    assert spread == dict.fromkeys(["kubernetes.io/hostname", "topology.kubernetes.io/zone"], expected)


@pytest.mark.cluster
def test_no_job_pushes_the_operator_off_its_node(rendered: list[dict[str, Any]]) -> None:
    pod = one(rendered, "Deployment")["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == "system-cluster-critical"


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("values", "scope", "bound"),
    [
        ((), Scope(), [""]),
        (("watchNamespaces.names={a,b}",), Scope(names=frozenset("ab")), ["a", "b"]),
        (
            ("watchNamespaces.labels.fleet=a,watchNamespaces.labels.spare=",),
            Scope(labels={"fleet": "a", "spare": ""}),
            [""],
        ),
    ],
    ids=["all", "a list", "a selector"],
)
def test_the_operator_may_write_where_it_leads(
    values: tuple[str, ...], scope: Scope, bound: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = render(*(part for each in values for part in ("--set", each)))
    bindings = [each for each in objects if each.get("roleRef", {}).get("name") == "spottrain-operator-jobs"]
    assert [each["metadata"].get("namespace", "") for each in bindings] == bound
    assert {each["kind"] for each in bindings} == {"RoleBinding" if bound[0] else "ClusterRoleBinding"}
    [reads] = [each for each in objects if each["metadata"]["name"] == "spottrain-operator" and "subjects" in each]
    assert Scope.from_json(reads["metadata"]["annotations"][ANNOTATION_WATCHED]) == scope
    [container] = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    for each in container["env"]:
        if "value" in each:
            monkeypatch.setenv(each["name"], each["value"])
    given = main.make_context("operator", []).params
    assert Scope(names=frozenset(given["watch_namespaces"]), labels=given["watch_labels"]) == scope


@pytest.mark.cluster
@pytest.mark.parametrize(("policy", "actions"), [("null", ["Deny"]), ("audit", ["Warn", "Audit"])])
def test_the_policy_of_jobs_refuses_unless_it_is_audit(policy: str, actions: list[str]) -> None:
    [found] = [
        each["spec"]["validationActions"]
        for each in render("--set", f"jobs.policy={policy}")
        if each["kind"] == "ValidatingAdmissionPolicyBinding" and each["metadata"]["name"] == "spottrain-jobs"
    ]
    assert found == actions


@pytest.mark.cluster
def test_a_large_burst_of_requests_stays_a_whole_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("operator: {client: {qps: 2000000, burst: 1000000}}")
    [container] = one(render("--values", str(values)), "Deployment")["spec"]["template"]["spec"]["containers"]
    for name in ("SPOTTRAIN_CLIENT_QPS", "SPOTTRAIN_CLIENT_BURST"):
        monkeypatch.setenv(name, env_of(container)[name])
    given = main.make_context("operator", ["--control-url", "https://a"]).params
    assert (given["client_qps"], given["client_burst"]) == (2_000_000, 1_000_000)


@pytest.mark.cluster
def test_operator_and_watcher_log_in_the_form_of_the_chart() -> None:
    objects = render("--set", "logFormat=json")
    for kind in ("Deployment", "DaemonSet"):
        [container] = one(objects, kind)["spec"]["template"]["spec"]["containers"]
        assert env_of(container)["SPOTTRAIN_LOG_FORMAT"] == "json"


@pytest.mark.cluster
def test_the_operator_may_write_the_lease_that_it_asks_for(rendered: list[dict[str, Any]]) -> None:
    rules = one(rendered, "Role")["rules"]
    [rule] = [each for each in rules if each.get("resources") == ["leases"] and "update" in each["verbs"]]
    assert rule["resourceNames"] == [LeaseSettings(namespace="n", identity="i").name]


@pytest.mark.cluster
def test_the_watcher_knows_its_node_and_runs_on_every_tainted_one(rendered: list[dict[str, Any]]) -> None:
    pod = one(rendered, "DaemonSet")["spec"]["template"]["spec"]
    assert pod["hostNetwork"] is True
    assert pod["tolerations"] == [{"operator": "Exists"}]
    [container] = pod["containers"]
    assert {ENV_NODE_NAME, ENV_HOST_IP} <= {each["name"] for each in container["env"]}


@pytest.mark.cluster
def test_a_port_and_more_spot_labels_reach_the_watcher_the_operator_and_its_pods() -> None:
    labels = 'spotLabels={"example.com/capacity":"spot","example.com/cheap":"true","example.com/spare":""}'
    objects = render("--set", "watcher.port=9999,podMonitor.enabled=true", "--set-json", labels)
    watcher, operator = (one(objects, kind)["spec"]["template"]["spec"] for kind in ("DaemonSet", "Deployment"))
    [container], [of_operator] = watcher["containers"], operator["containers"]
    assert env_of(container)[ENV_WATCHER_PORT] == env_of(of_operator)[ENV_WATCHER_PORT] == "9999"
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert container[probe]["httpGet"] == {"path": path, "port": 9999}
        assert of_operator[probe]["httpGet"] == {"path": path, "port": "health"}
    [port] = container["ports"]
    assert port["containerPort"] == 9999
    monitors = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "PodMonitor"}
    ports = {each["name"]: str(each["containerPort"]) for each in of_operator["ports"]}
    assert ports["health"] == env_of(of_operator)["SPOTTRAIN_HEALTH_PORT"]
    assert ports["metrics"] == env_of(of_operator)["SPOTTRAIN_METRICS_PORT"]
    assert monitors["spottrain-operator"]["podMetricsEndpoints"][0]["port"] == "metrics"
    assert monitors["spottrain-watcher"]["podMetricsEndpoints"][0]["port"] == port["name"]

    command = ["--control-url", "https://a", "--spot-labels", env_of(of_operator)["SPOTTRAIN_SPOT_LABELS"]]
    site = Site(spot_labels=main.make_context("operator", command).params["spot_labels"])
    assert site.spot_labels == {"example.com/capacity": "spot", "example.com/cheap": "true", "example.com/spare": ""}
    spec = TrainingJobSpec.model_validate(
        {
            **{"image": "i", "entrypoint": {"script": "t.py"}, "nodes": {"max": 1}, "batch": {"global": 1}},
            "checkpoint": {"uri": "s3://b/c"},
        }
    )
    assert watcher["affinity"]["nodeAffinity"] == node_affinity(spec, CapacityType.SPOT, None, site)
    required = operator["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    [term] = required["nodeSelectorTerms"]
    avoided = {each["key"]: each["values"] for each in term["matchExpressions"] if each["operator"] == "NotIn"}
    of_templates = {EKS_TEMPLATE_CAPACITY_TYPE: "SPOT"}
    assert avoided == {key: [value] for key, value in {**SPOT_LABELS, **of_templates, **site.spot_labels}.items()}


@pytest.mark.cluster
def test_helm_test_knows_where_the_watcher_runs() -> None:
    objects = render("--set", "watcher.nodeSelector.pool=gpu", "--set-json", 'spotLabels={"a":"b"}')
    watcher = one(objects, "DaemonSet")["spec"]["template"]["spec"]
    [pod] = [each for each in objects if each["metadata"]["name"] == "spottrain-test-operator"]
    [_, _, _, *arguments] = pod["spec"]["containers"][0]["command"]
    context = selfcheck.make_context("selfcheck", [*arguments, "--url", "https://a", "--namespace", "a"])
    assert json.loads(context.params["placement"]) == {
        "nodeSelector": watcher["nodeSelector"],
        **watcher["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"],
    }


@pytest.mark.cluster
def test_a_watcher_on_all_nodes_stays_on_all_nodes() -> None:
    objects = render("--set-json", 'spotLabels={"a":"b"}', "--set-json", "watcher.affinity.nodeAffinity=null")
    assert "affinity" not in one(objects, "DaemonSet")["spec"]["template"]["spec"]


@pytest.mark.parametrize("text", ["spot", "=spot", "a b=c", "a=b=c", "a=b\nc=d", f"a={'x' * 10_000}"])
def test_a_label_that_is_none_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(click.BadParameter) as refused:
        main.make_context("operator", ["--control-url", "https://a", "--spot-labels", text])
    assert "is not a label with its value. Write key=value pairs" in refused.value.message
    assert len(refused.value.message) < 500


def test_the_operator_takes_names_of_namespaces_or_their_labels() -> None:
    command = ["--control-url", "https://a", "--watch-namespace", "a", "--watch-labels", "fleet=a"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert "--watch-namespace and --watch-labels are both given" in result.output


def env_of(container: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in container["env"]}


@pytest.mark.parametrize("isolates", [True, False])
def test_the_operator_may_create_network_policies_only_if_it_does(
    isolates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = render("--set", f"jobs.networkPolicies={str(isolates).lower()}")
    roles = {each["metadata"]["name"]: each for each in objects if each["kind"] == "ClusterRole"}
    rules = [*roles["spottrain-operator"]["rules"], *roles["spottrain-operator-jobs"]["rules"]]
    granted = [rule["verbs"] for rule in rules if "networkpolicies" in rule.get("resources", ())]
    assert granted == ([["create"]] if isolates else [])
    [deployment] = [each for each in objects if each["kind"] == "Deployment"]
    for variable in deployment["spec"]["template"]["spec"]["containers"][0]["env"]:
        if "value" in variable:
            monkeypatch.setenv(variable["name"], variable["value"])
    assert main.make_context("operator", []).params["network_policies"] is isolates


def test_an_image_that_is_named_by_digest_has_it_everywhere() -> None:
    digest = f"sha256:{'ab' * 32}"
    specs = [each.get("spec", {}) for each in render("--set", f"image.digest={digest}")]
    pods = [spec.get("template", {}).get("spec", spec) for spec in specs]
    images = {container["image"] for pod in pods for container in pod.get("containers", [])}
    assert {image.partition("@")[2] for image in images} == {digest}
    assert all(image.startswith("spottrain-operator:") for image in images)


def test_the_default_profile_is_made_once_its_crd_is_there() -> None:
    spec = {"image": "registry/train:1", "limits": {"nodes": 16}}
    [profile] = [
        each for each in render("--set-json", f"defaultProfile={json.dumps(spec)}") if each["kind"] == PROFILE_KIND
    ]
    assert profile["metadata"]["name"] == DEFAULT_PROFILE
    assert profile["metadata"]["annotations"]["helm.sh/hook"] == "post-install,post-upgrade"
    assert profile["spec"] == spec
    assert PROFILE_KIND not in {each["kind"] for each in render()}
