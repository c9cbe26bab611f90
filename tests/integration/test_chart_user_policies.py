"""The chart's admission policy for users of jobs, on a real API server.

It says what a user can't do by a job. Each user speaks by impersonation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chart_site import Object, Site, enforced, rendered
from hostile_pod_templates import template

pytestmark = pytest.mark.cluster

MAY_NOT = "for which you lack the verb"


def uses(kind: str) -> Object:
    """Parts of a spec that use an object `theirs` of this kind."""
    secret = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "theirs", "key": "k"}}}
    settings = {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "theirs", "key": "k"}}}
    beside = {"name": "helper", "image": "helper", "env": [secret]}
    csi = {"driver": "free.dev", "nodePublishSecretRef": {"name": "theirs"}}
    vault = {"driver": "theirs", "volumeAttributes": {"secretProviderClass": "vault"}}
    parts: dict[str, Object] = {
        "secret of env": {"env": [secret]},
        "secret of a sidecar": template(sidecars=[beside]),
        "secret of an init container": template(initContainers=[beside]),
        "secret volume": template(volumes=[{"name": "a", "secret": {"secretName": "theirs"}}]),
        "secret of a CSI volume": template(volumes=[{"name": "a", "csi": csi}]),
        "image-pull secret": template(imagePullSecrets=[{"name": "theirs"}]),
        "one secret among many": {
            "env": [{"name": "B", "value": "b"}, {"name": "C", "valueFrom": secret["valueFrom"]}, secret]
        },
        "config map of env": {"env": [settings]},
        "config map volume": template(volumes=[{"name": "a", "configMap": {"name": "theirs"}}]),
        "service account": template(serviceAccountName="theirs"),
        "priority class": template(priorityClassName="theirs"),
        "runtime class": template(runtimeClassName="theirs"),
        "claim": template(volumes=[{"name": "a", "persistentVolumeClaim": {"claimName": "theirs"}}]),
        "claim for each pod": template(volumes=[{"name": "a", "ephemeral": {"volumeClaimTemplate": {}}}]),
        "driver of a CSI volume": template(volumes=[{"name": "a", "csi": vault}]),
        "devices of a claim": template(resourceClaims=[{"name": "a", "resourceClaimName": "theirs"}]),
        "devices of a template": template(resourceClaims=[{"name": "a", "resourceClaimTemplateName": "theirs"}]),
    }
    return parts[kind]


# What a user uses by a job, and the right that it takes.
USED = {
    "secret of env": ("get", "", "secrets"),
    "secret of a sidecar": ("get", "", "secrets"),
    "secret of an init container": ("get", "", "secrets"),
    "secret volume": ("get", "", "secrets"),
    "secret of a CSI volume": ("get", "", "secrets"),
    "image-pull secret": ("get", "", "secrets"),
    "one secret among many": ("get", "", "secrets"),
    "config map of env": ("get", "", "configmaps"),
    "config map volume": ("get", "", "configmaps"),
    "service account": ("use", "", "serviceaccounts"),
    "priority class": ("use", "scheduling.k8s.io", "priorityclasses"),
    "runtime class": ("use", "node.k8s.io", "runtimeclasses"),
    "claim": ("use", "", "persistentvolumeclaims"),
    "claim for each pod": ("create", "", "persistentvolumeclaims"),
    "driver of a CSI volume": ("use", "storage.k8s.io", "csidrivers"),
    "devices of a claim": ("use", "resource.k8s.io", "resourceclaims"),
    "devices of a template": ("use", "resource.k8s.io", "resourceclaimtemplates"),
}


@pytest.fixture(scope="module")
def users(site: Site) -> Iterator[Callable[..., str]]:
    """Make a user with rights on TrainingJobs and one CSI driver.

    `rules` are further rights. Returns the user's name.
    """
    jobs = {"apiGroups": ["spottrain.dev"], "resources": ["trainingjobs"], "verbs": ["*"]}
    driver = {
        "apiGroups": ["storage.k8s.io"],
        "resources": ["csidrivers"],
        "resourceNames": ["free.dev"],
        "verbs": ["use"],
    }
    made: list[str] = []

    def user(*rules: Object) -> str:
        name = f"{site.name}-user-{len(made)}"
        subjects = [{"kind": "User", "name": name, "apiGroup": "rbac.authorization.k8s.io"}]
        for kind, rest in (
            ("ClusterRole", {"rules": [jobs, driver, *rules]}),
            (
                "ClusterRoleBinding",
                {
                    "subjects": subjects,
                    "roleRef": {"kind": "ClusterRole", "name": name, "apiGroup": "rbac.authorization.k8s.io"},
                },
            ),
        ):
            api = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": {"name": name}}
            site.kubectl.create(api | rest)
        made.append(name)
        return name

    yield user
    for name in made:
        for kind in ("clusterrole", "clusterrolebinding"):
            site.kubectl.delete(kind, name)


@pytest.fixture(scope="module")
def poor(site: Site, users: Any) -> str:
    """A user with rights on TrainingJobs alone, once the policy on jobs is enforced."""
    user = str(users())
    enforced(lambda: site.tries(user, site.job()), refused=False)
    enforced(lambda: site.tries(user, site.job(**uses("service account"))))
    return user


@pytest.mark.parametrize("kind", USED)
def test_rights_on_jobs_alone_give_no_use_of_anything_else(site: Site, poor: str, kind: str) -> None:
    verb, _, resource = USED[kind]
    said = site.tries(poor, site.job(**uses(kind)))
    assert f"the job uses {resource}/" in said, said
    assert f"{MAY_NOT} {verb}." in said


@pytest.mark.parametrize("field", ["dataSource", "dataSourceRef"])
@pytest.mark.parametrize(
    ("group", "kind", "resource"),
    [
        ("", "PersistentVolumeClaim", "persistentvolumeclaims"),
        ("snapshot.storage.k8s.io", "VolumeSnapshot", "volumesnapshots"),
    ],
)
def test_a_claim_for_each_pod_is_filled_from_what_the_user_may_use(
    site: Site, poor: str, users: Any, group: str, kind: str, resource: str, field: str
) -> None:
    origin = {"kind": kind, "name": "theirs", **({"apiGroup": group} if group else {})}
    claim = {"volumeClaimTemplate": {"spec": {field: origin}}}
    job = site.job(**template(volumes=[{"name": "a", "ephemeral": claim}]))
    create = {"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["create"]}
    use = {"apiGroups": [group], "resources": [resource], "resourceNames": ["theirs"], "verbs": ["use"]}
    creator = users(create)
    enforced(lambda: site.tries(creator, site.job(**uses("claim for each pod"))), refused=False)
    assert f"the job uses {resource}/theirs, {MAY_NOT} use." in site.tries(creator, job)
    both = users(create, use)
    enforced(lambda: site.tries(both, job), refused=False)


@pytest.mark.nightly
def test_the_right_to_use_one_object_is_enough(site: Site, users: Any) -> None:
    for verb, group, resource in sorted(set(USED.values())):
        only = {} if verb == "create" else {"resourceNames": ["theirs"]}
        user = users({"apiGroups": [group], "resources": [resource], "verbs": [verb], **only})
        kinds = [kind for kind, right in USED.items() if right == (verb, group, resource)]
        enforced(lambda user=user, kind=kinds[0]: site.tries(user, site.job(**uses(kind))), refused=False)  # type: ignore[misc]
        for kind in USED:
            assert (site.tries(user, site.job(**uses(kind))) == "") is (kind in kinds), kind
        other: Object = {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "other", "key": "k"}}}]}
        assert MAY_NOT in site.tries(user, site.job(**other))


def test_who_may_create_pods_may_use_what_these_could(site: Site, users: Any) -> None:
    user = users({"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]})
    enforced(lambda: site.tries(user, site.job(**uses("service account"))), refused=False)
    for kind in USED:
        assert site.tries(user, site.job(**uses(kind))) == "", kind


def test_a_job_with_someones_rights_is_not_changed_by_others(site: Site, poor: str) -> None:
    site.kubectl.create(site.job("rich", **uses("service account")))

    def patched(change: Object) -> str:
        return site.patched(poor, "tj", "rich", change)

    assert MAY_NOT in patched({"spec": {"image": "evil"}})
    assert patched({"metadata": {"labels": {"a": "b"}}}) == ""
    assert patched({"spec": {"podTemplate": {"serviceAccountName": "default"}}}) == ""


def secrets(number: int, different: bool) -> Object:
    def name(index: int) -> str:
        return f"s{index}" if different else "same"

    sources = [{"secretKeyRef": {"name": name(index), "key": "k"}} for index in range(number)]
    return {"env": [{"name": f"A{index}", "valueFrom": source} for index, source in enumerate(sources)]}


def test_a_limit_on_what_a_job_names_holds_for_those_who_need_rights(site: Site, poor: str, users: Any) -> None:
    reader = users({"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]})
    enforced(lambda: site.tries(reader, site.job(**secrets(1, True))), refused=False)
    assert site.tries(reader, site.job(**secrets(24, True))) == "", "within what CEL may cost"
    assert "names at most 24 Secrets" in site.tries(reader, site.job(**secrets(25, True)))
    assert MAY_NOT in site.tries(poor, site.job(**secrets(24, False)))
    creator = users({"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]})
    enforced(lambda: site.tries(creator, site.job(**secrets(60, True))), refused=False)


def test_an_administrator_may_have_jobs_audited_or_left_alone(site: Site, poor: str) -> None:
    job = site.job(**uses("service account"))
    assert MAY_NOT in site.tries(poor, job)
    site.install({"jobs": {"policy": "audit"}})
    enforced(lambda: site.tries(poor, job), refused=False)
    done = site.kubectl.run("create", "--dry-run=server", "-f", "-", f"--as={poor}", stdin=json.dumps(job))
    assert MAY_NOT in done.stderr
    assert f"Warning: Validation failed for ValidatingAdmissionPolicy '{site.name}-jobs'" in done.stderr
    for off in ("off", False):
        names = {each["metadata"]["name"] for each in rendered(site.name, {"jobs": {"policy": off}})}
        assert f"{site.name}-jobs" not in names
    site.install({})
    enforced(lambda: site.tries(poor, job))
