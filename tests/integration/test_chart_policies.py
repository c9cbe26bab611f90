"""The chart's admission policies for operator and watcher, on a real API server.

They say what the two can't do. Each speaks with a token of its service account, as in its pod.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart_site import Object, Site, enforced
from cluster_api import ClusterApi, refusal
from cluster_fixtures import wait_for
from hostile_pod_templates import RIGHTS_BY_ANNOTATION, template
from spottrain_api.contract.names import (
    ANNOTATION_CONTROL_CA,
    ANNOTATION_CONTROL_URL,
    ANNOTATION_DO_NOT_DISRUPT,
    ANNOTATION_NOTICE,
    ANNOTATION_SAFE_TO_EVICT,
    LABEL_LEADER,
    TAINT_PREEMPTION,
)
from spottrain_api.contract.nodes import LABEL_SHUTDOWN_GRACE
from spottrain_local.binaries import find_crds
from spottrain_local.go_module import KARPENTER_MODULE
from spottrain_operator.kube.lease import LEASE_NAME
from spottrain_operator.objects.node_pools import node_pools
from spottrain_operator.objects.observe import job_view

pytestmark = pytest.mark.cluster

# --- the operator ----------------------------------------------------------------------------------------

NOT_ITS_OWN = "operator creates, changes and deletes the pods of TrainingJobs alone"
HOST = "share no network, processes or ports with their host"
RIGHTS = "has more rights than jobs.allowedNetworks and policies.allowedCapabilities"
ESCALATION = "drop all capabilities and do not allow privilege escalation"
TOKEN = "get no token for the API server"
# The local API server's own audience, and that of a mesh.
API_SERVER, ISTIO = "https://kubernetes.default.svc", "istio-ca"
ANNOTATION = "get no devices or folders of their host by an annotation"
Change = Callable[[Object], object]


def container(**changes: Any) -> Change:
    return lambda pod: pod["spec"]["containers"][0].update(changes)


def of_spec(**changes: Any) -> Change:
    return lambda pod: pod["spec"].update(changes)


def with_volume(**source: Any) -> Change:
    return lambda pod: pod["spec"]["volumes"].append({"name": "more", **source})


def with_token(**source: Any) -> Change:
    token = {"serviceAccountToken": {"path": "token", **source}}
    return with_volume(name="token", projected={"sources": [token]})


def refused_token(audience: str) -> str:
    return f"for the audience {audience}, which is not in policies.allowedTokenAudiences of the chart spottrain"


def annotated(key: str, value: str) -> Change:
    return lambda pod: pod["metadata"]["annotations"].update({key: value})


BAD_PODS: dict[str, tuple[Change, str]] = {
    "no label": (lambda pod: pod["metadata"].pop("labels"), NOT_ITS_OWN),
    "no owner": (lambda pod: pod["metadata"].pop("ownerReferences"), NOT_ITS_OWN),
    "a Deployment's": (lambda pod: pod["metadata"]["ownerReferences"][0].update(kind="ReplicaSet"), NOT_ITS_OWN),
    "another API's": (lambda pod: pod["metadata"]["ownerReferences"][0].update(apiVersion="a.dev/v1"), NOT_ITS_OWN),
    "not controlled": (lambda pod: pod["metadata"]["ownerReferences"][0].update(controller=False), NOT_ITS_OWN),
    "host network": (of_spec(hostNetwork=True), HOST),
    "host PID": (of_spec(hostPID=True), HOST),
    "host IPC": (of_spec(hostIPC=True), HOST),
    "host port": (container(ports=[{"containerPort": 80, "hostPort": 80}]), HOST),
    "a node of its choice": (of_spec(nodeName="control-plane"), HOST),
    "privileged": (container(securityContext={"privileged": True}), RIGHTS),
    "capability": (container(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}), RIGHTS),
    "locked memory": (container(securityContext={"capabilities": {"add": ["IPC_LOCK"]}}), RIGHTS),
    "sidecar": (
        of_spec(initContainers=[{"name": "a", "image": "a", "securityContext": {"privileged": True}}]),
        RIGHTS,
    ),
    "root": (container(securityContext={"runAsUser": 0, "runAsNonRoot": False}), "do not run as root"),
    "setuid programs": (container(securityContext={"capabilities": {"drop": ["ALL"]}}), ESCALATION),
    "default capabilities": (container(securityContext={"allowPrivilegeEscalation": False}), ESCALATION),
    "a sidecar's setuid programs": (of_spec(initContainers=[{"name": "a", "image": "a"}]), ESCALATION),
    "root pod": (of_spec(securityContext={}), "do not run as root"),
    "host path": (with_volume(hostPath={"path": "/"}), "mount no folder of their host"),
    "TCPX's path": (with_volume(hostPath={"path": "/sys"}), "mount no folder of their host"),
    "automatic token": (of_spec(automountServiceAccountToken=True), TOKEN),
    "token": (with_token(), TOKEN),
    "token for the API server by name": (with_token(audience=API_SERVER), refused_token(API_SERVER)),
    "mesh's token": (with_token(audience=ISTIO), refused_token(ISTIO)),
    **{key: (annotated(key, value), ANNOTATION) for key, value in RIGHTS_BY_ANNOTATION.items()},
}


@pytest.fixture(scope="module")
def held(site: Site) -> Site:
    """The site, once the policies on the operator's pods are enforced."""
    operator, pod = site.account("operator"), site.pod(hostNetwork=True)
    enforced(lambda: site.tries(operator, pod))
    return site


@pytest.mark.parametrize("case", BAD_PODS)
def test_the_operator_creates_only_pods_of_its_own_kind(held: Site, case: str) -> None:
    change, sentence = BAD_PODS[case]
    pod = held.pod()
    change(pod)
    assert sentence in held.tries(held.account("operator"), pod)


@pytest.mark.parametrize(("opens", "closes"), [('{"a":', "}"), ("[", "]")], ids=["objects", "lists"])
def test_a_spec_that_is_nested_deeply_is_refused(held: Site, opens: str, closes: str) -> None:
    """The API server takes ten thousand levels; the watch of all jobs, a thousand."""
    job = json.dumps(held.job(strategy="deepspeed", deepspeed={"config": {"a": "@"}}))

    def said(levels: int) -> str:
        text = job.replace('"@"', opens * levels + "1" + closes * levels)
        done = held.kubectl.run("create", "--dry-run=server", "-n", held.name, "-f", "-", stdin=text)
        return "" if done.returncode == 0 else done.stderr

    enforced(lambda: said(30))
    assert said(17) == ""
    for levels in (18, 30, 900, 9000):
        assert "spec is nested more than 20 levels deep; see podTemplate.volumes and deepspeed.config" in said(levels)


def test_the_operator_creates_pods_of_jobs(held: Site) -> None:
    assert held.tries(held.account("operator"), held.pod()) == ""


@pytest.mark.parametrize("audience", ["sts.amazonaws.com", "pods.eks.amazonaws.com", "api://AzureADTokenExchange"])
def test_a_webhook_may_add_a_token_for_the_cloud(held: Site, audience: str) -> None:
    pod = held.pod()
    with_token(audience=audience)(pod)
    assert held.tries(held.account("operator"), pod) == ""


def test_a_pod_may_have_an_apparmor_profile_of_a_webhook(held: Site) -> None:
    pod = held.pod()
    annotated("container.apparmor.security.beta.kubernetes.io/trainer", "runtime/default")(pod)
    assert held.tries(held.account("operator"), pod) == ""


def test_the_operator_changes_its_annotations_alone(held: Site) -> None:
    operator = held.account("operator")
    held.kubectl.create(held.job("owner"))
    uid = held.kubectl.get("tj", "owner", held.name)["metadata"]["uid"]
    pods = {"own-1": held.pod(nodeName="nowhere"), "web-1": held.pod(nodeName="nowhere")}
    pods["own-1"]["metadata"]["ownerReferences"][0] |= {"name": "owner", "uid": uid}
    del pods["web-1"]["metadata"]["ownerReferences"]
    for name, pod in pods.items():
        pod["metadata"] |= {"name": name, "annotations": {"a": "b"}}
        held.kubectl.create(pod, held.name)

    def patched(name: str, **metadata: Any) -> str:
        return held.patched(operator, "pod", name, {"metadata": metadata})

    more = "changes no more of a pod than its annotations for autoscalers"
    for own in (ANNOTATION_SAFE_TO_EVICT, ANNOTATION_DO_NOT_DISRUPT, ANNOTATION_CONTROL_URL, ANNOTATION_CONTROL_CA):
        assert patched("own-1", annotations={own: "false"}) == ""
    for metadata in (
        {"annotations": {"a": "c"}},
        {"annotations": {"a": None}},
        {"annotations": {"other": "c"}},
        {"labels": {"app": "web"}},
        {"finalizers": ["a.dev/b"]},
        {"ownerReferences": None},
    ):
        assert more in patched("own-1", **metadata), metadata
    image = {"spec": {"containers": [{"name": "trainer", "image": "evil"}]}}
    assert more in held.patched(operator, "pod", "own-1", image, how="strategic")
    assert NOT_ITS_OWN in patched("web-1", annotations={ANNOTATION_SAFE_TO_EVICT: "false"})
    assert NOT_ITS_OWN in held.deleted(operator, "pod", "web-1")
    assert held.deleted(operator, "pod", "own-1") == ""


def test_the_operator_labels_its_own_pods_and_no_more(held: Site) -> None:
    operator = held.account("operator")
    ours = {"app.kubernetes.io/name": "spottrain", "app.kubernetes.io/instance": held.name}
    ours["app.kubernetes.io/component"] = "operator"
    spec = {"containers": [{"name": "c", "image": "i"}], "nodeName": "nowhere"}
    for name, labels in {"operator-1": ours, "web-2": {"app": "web"}}.items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
        held.kubectl.create(pod, held.name)

    def labelled(name: str, **labels: str | None) -> str:
        return held.patched(operator, "pod", name, {"metadata": {"labels": labels}})

    leader = {LABEL_LEADER: "true"}
    assert labelled("operator-1", **leader) == ""
    assert NOT_ITS_OWN in labelled("web-2", **leader)
    assert NOT_ITS_OWN in labelled("web-2", **ours), "to make it one of its own"
    assert "changes no more of a pod than" in labelled("operator-1", app="web")
    assert NOT_ITS_OWN in held.deleted(operator, "pod", "operator-1")


def test_the_operator_leads_only_namespaces_with_the_labels_of_watch_namespaces(held: Site) -> None:
    operator = held.account("operator")
    held.install({"watchNamespaces": {"labels": {"fleet": ""}}})
    enforced(lambda: held.tries(operator, held.pod()))
    assert "leads the jobs of namespaces with the labels of watchNamespaces" in held.tries(operator, held.pod())
    held.kubectl.patch("namespace", held.name, {"metadata": {"labels": {"fleet": ""}}})
    enforced(lambda: held.tries(operator, held.pod()), refused=False)
    held.install({})


def test_the_operator_deletes_only_finished_jobs_that_ask_for_it(held: Site) -> None:
    operator = held.account("operator")
    asks = {"runPolicy": {"ttlSecondsAfterFinished": 60}}
    jobs = {"runs": (asks, "Running"), "new": (asks, ""), "stays": ({}, "Succeeded"), "goes": (asks, "Failed")}
    for name, (changes, phase) in jobs.items():
        held.kubectl.create(held.job(name, **changes))
        if phase:
            status = {"status": {"phase": phase}}
            held.kubectl.patch("tj", name, status, held.name, subresource="status")
    enforced(lambda: held.deleted(operator, "tj", "new", kept=False))
    for name in ("runs", "new", "stays"):
        assert "deletes finished TrainingJobs with" in held.deleted(operator, "tj", name), name
    assert held.deleted(operator, "tj", "goes") == ""


def test_only_operators_write_the_lease_by_which_releases_find_each_other(site: Site) -> None:
    operator, tenant = site.account("operator"), f"{site.name}-tenant"
    site.kubectl("create", "rolebinding", "tenant", "-n", site.name, "--clusterrole=edit", f"--user={tenant}")

    def lease(name: str) -> Object:
        spec = {"holderIdentity": "nobody", "leaseDurationSeconds": 2**31 - 1}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": spec}

    def renewed(user: str) -> str:
        # As the operator does, which may not patch.
        found = site.kubectl.get("lease", LEASE_NAME, site.name)
        found["spec"] |= {"holderIdentity": user}
        server = site.kubectl.speaking_for(user)
        return refusal(lambda: server.replace(found, kept=False))

    enforced(lambda: site.tries(tenant, lease("other")), refused=False)
    enforced(lambda: site.tries(tenant, lease(LEASE_NAME)))
    sentence = "only who may create TokenReviews may write it. Choose another name"
    assert sentence in site.tries(tenant, lease(LEASE_NAME))
    assert site.tries(operator, lease(LEASE_NAME)) == ""
    site.kubectl.create(lease(LEASE_NAME), site.name)
    assert sentence in renewed(tenant)
    assert renewed(operator) == ""
    site.kubectl.delete("lease", LEASE_NAME, site.name)


def test_an_administrator_allows_networks_and_what_webhooks_add(site: Site) -> None:
    operator = site.account("operator")
    networks = {
        "efa": {"limits": {"vpc.amazonaws.com/efa": "4"}},
        "tcpx": {"limits": {"nvidia.com/gpu": "8"}},
    }
    pods = {name: site.pod(template(network=name) | {"resources": r}) for name, r in networks.items()}
    mesh = site.pod(
        initContainers=[{"name": "a", "image": "a", "securityContext": {"capabilities": {"add": ["NET_RAW"]}}}]
    )
    with_volume(hostPath={"path": "/var/run/agent"})(mesh)
    with_token(audience=ISTIO)(mesh)
    for pod in (*pods.values(), mesh):
        enforced(lambda pod=pod: site.tries(operator, pod))  # type: ignore[misc]
    policies = {
        "allowedCapabilities": ["NET_RAW"],
        "allowedHostPaths": ["/var/run/agent"],
        "allowedTokenAudiences": [ISTIO],
    }
    for values, allowed in (
        ({"jobs": {"allowedNetworks": ["efa"]}}, pods["efa"]),
        ({"jobs": {"allowedNetworks": ["tcpx"]}}, pods["tcpx"]),
        ({"policies": policies}, mesh),
    ):
        site.install(values)
        enforced(lambda pod=allowed: site.tries(operator, pod), refused=False)  # type: ignore[misc]
        assert [site.tries(operator, pod) == "" for pod in (*pods.values(), mesh)].count(True) == 1
        assert HOST in site.tries(operator, site.pod(hostNetwork=True))
    site.install({})
    enforced(lambda: site.tries(operator, mesh))


def test_the_operator_makes_changes_and_deletes_node_pools_of_jobs_alone(site: Site) -> None:
    """Its role would let it delete any NodePool, and all nodes with it."""
    definition = yaml.safe_load((find_crds(KARPENTER_MODULE) / "karpenter.sh_nodepools.yaml").read_text())
    site.kubectl.apply(definition)
    wait_for(lambda: site.kubectl.serves("nodepool"), "NodePools are served")
    operator, own, other = site.account("operator"), f"{site.name}-own", f"{site.name}-other"
    node_class = {"group": "a.dev", "kind": "A", "name": "a"}
    pool = {"name": "a", "capacityType": "spot", "provider": "karpenter", "nodeClass": node_class}
    metadata = {"namespace": "a", "name": "a", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    view = job_view(site.job(capacity={"pools": [pool]}) | {"metadata": metadata})
    [made] = node_pools(view).values()
    mine = made | {"metadata": made["metadata"] | {"name": own}}
    theirs = made | {"metadata": {"name": other}}
    refused = "the NodePools of TrainingJobs alone"
    wait_for(lambda: refused in site.tries(operator, theirs), "the policy is enforced")
    wait_for(lambda: not site.tries(operator, mine), "the operator may make its own")
    try:
        for each in (mine, theirs):
            site.kubectl.apply(each)
        assert not site.deleted(operator, "nodepool", own)
        assert refused in site.deleted(operator, "nodepool", other)
    finally:
        for name in (own, other):
            refusal(lambda name=name: site.kubectl.delete("nodepool", name))  # type: ignore[misc]


# --- the watcher -----------------------------------------------------------------------------------------


@pytest.fixture
def watcher(site: Site, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Patch a node with the token of a watcher on the node MINE.

    Returns what the API server says against it. `mine-` and `other-` nodes have no kubelet.
    """
    for node in ("mine", "other"):
        labels = {"kubernetes.io/hostname": f"{node}-{site.name}"}
        taints = [{"key": "dedicated", "effect": "NoSchedule"}]
        metadata = {"name": f"{node}-{site.name}", "labels": labels, "annotations": {"a": "b"}}
        made = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": taints}}
        site.kubectl.create(made)
    spec = {
        "nodeName": f"mine-{site.name}",
        "serviceAccountName": f"{site.name}-watcher",
        "containers": [{"name": "watcher", "image": "w"}],
        "tolerations": [{"operator": "Exists"}],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "watcher"}, "spec": spec}
    site.kubectl.create(pod, site.name)
    account = f"{site.name}-watcher"
    bound = site.kubectl.token(account, site.name, pod="watcher")
    of_nobody = site.kubectl.token(account, site.name)
    config = yaml.safe_load(site.kubectl.kubeconfig.read_text())
    servers: dict[str, ClusterApi] = {}
    for token in (bound, of_nobody):
        user = [{"name": config["users"][0]["name"], "user": {"token": token}}]
        path = tmp_path / f"{len(servers)}.kubeconfig"
        path.write_text(yaml.safe_dump(config | {"users": user}))
        servers[token] = ClusterApi(kubeconfig=path)

    def patch(node: str, change: Object, *, token: str = bound) -> str:
        """What refuses a change to the node as it is. One that controllers change meanwhile is read again."""
        name = f"{node}-{site.name}"

        def answer() -> str:
            changed = _based_on(site.kubectl.get("node", name), change)
            return refusal(lambda: servers[token].patch("node", name, changed, kept=False))

        while "the object has been modified" in (refused := answer()):
            pass
        return refused

    patch.of_nobody = of_nobody  # type: ignore[attr-defined]
    yield patch
    site.kubectl.delete("pod", "watcher", site.name, grace_seconds=0)
    for node in ("mine", "other"):
        site.kubectl.delete("node", f"{node}-{site.name}")


def _based_on(current: Object, change: Object) -> Object:
    """This change to a node of this version. The taints that controllers set when there is no kubelet stay."""
    metadata = change.get("metadata", {}) | {"resourceVersion": current["metadata"]["resourceVersion"]}
    spec = change.get("spec", {})
    if spec.get("taints"):
        theirs = [each for each in current["spec"].get("taints", []) if each["key"].startswith("node.kubernetes.io/")]
        spec = spec | {"taints": [*spec["taints"], *theirs]}
    return change | {"metadata": metadata, "spec": spec}


NOTICE = {"metadata": {"annotations": {ANNOTATION_NOTICE: "{}"}}}
DEDICATED = {"key": "dedicated", "effect": "NoSchedule"}
OURS = {"key": TAINT_PREEMPTION, "effect": "NoSchedule"}
METADATA, SPEC = "changes no more of a node's metadata than", "changes no more of a node's spec than"
BAD_PATCHES: dict[str, tuple[Object, str]] = {
    "label": ({"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}}, METADATA),
    "no label": ({"metadata": {"labels": None}}, METADATA),
    "annotation": ({"metadata": {"annotations": {"a": "c"}}}, METADATA),
    "no annotation": ({"metadata": {"annotations": {"a": None}}}, METADATA),
    "another annotation": ({"metadata": {"annotations": {"c": "d"}}}, METADATA),
    "finalizer": ({"metadata": {"finalizers": ["a.dev/b"]}}, METADATA),
    "taint": ({"spec": {"taints": [DEDICATED, {"key": "b", "effect": "NoExecute"}]}}, SPEC),
    "no taint": ({"spec": {"taints": [OURS]}}, SPEC),
    "cordon": ({"spec": {"unschedulable": True}}, SPEC),
    "provider": ({"spec": {"providerID": "aws:///mine"}}, SPEC),
    "eviction": ({"spec": {"taints": [DEDICATED, OURS | {"effect": "NoExecute"}]}}, "evicts no pods"),
}


def test_the_watcher_marks_its_own_node_and_no_more(site: Site, watcher: Any) -> None:
    enforced(lambda: watcher("other", NOTICE))
    own = "changes its own node alone"
    assert own in watcher("other", NOTICE)
    assert own in watcher("mine", NOTICE, token=watcher.of_nobody)
    assert watcher("mine", NOTICE | {"spec": {"taints": [DEDICATED, OURS]}}) == ""
    assert watcher("mine", {"metadata": {"labels": {LABEL_SHUTDOWN_GRACE: "105"}}}) == ""
    for case, (change, sentence) in BAD_PATCHES.items():
        assert sentence in watcher("mine", change), case


def test_the_policies_have_no_mistakes_that_kubernetes_finds(site: Site) -> None:
    def warnings() -> Any:
        policies = site.kubectl.list("validatingadmissionpolicy")
        ours = [each for each in policies if each["metadata"]["name"].startswith(site.name)]
        assert len(ours) == 7
        checked = [each for each in ours if each.get("status", {}).get("observedGeneration")]
        return [each["status"].get("typeChecking", {}) for each in checked] if len(checked) == 7 else None

    wait_for(lambda: warnings() is not None, "Kubernetes has checked the policies")
    assert warnings() == [{}] * 7
