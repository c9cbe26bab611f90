"""Requests to an API server in the tests' own process.

Each kubectl takes a tenth of a second of a processor, and tests ask often.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from spottrain_api.contract.names import GROUP, PLURAL, VERSION
from spottrain_api.history import HISTORY_PLURAL

_RBAC = "apis/rbac.authorization.k8s.io/v1"
_ADMISSION = "apis/admissionregistration.k8s.io/v1"
# Where the API has what tests look at, by kind or by kubectl's name for it.
PATHS = {
    "clusterrole": f"{_RBAC}/clusterroles",
    "clusterrolebinding": f"{_RBAC}/clusterrolebindings",
    "configmap": "api/v1/{}configmaps",
    "customresourcedefinition": "apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "daemonset": "apis/apps/v1/{}daemonsets",
    "deployment": "apis/apps/v1/{}deployments",
    "events": "api/v1/{}events",
    "lease": "apis/coordination.k8s.io/v1/{}leases",
    "limitrange": "api/v1/{}limitranges",
    "namespace": "api/v1/namespaces",
    "node": "api/v1/nodes",
    "nodepool": "apis/karpenter.sh/v1/nodepools",
    "poddisruptionbudget": "apis/policy/v1/{}poddisruptionbudgets",
    "pod": "api/v1/{}pods",
    "resourcequota": "api/v1/{}resourcequotas",
    "role": f"{_RBAC}/{{}}roles",
    "rolebinding": f"{_RBAC}/{{}}rolebindings",
    "secret": "api/v1/{}secrets",
    "selfsubjectaccessreview": "apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
    "service": "api/v1/{}services",
    "serviceaccount": "api/v1/{}serviceaccounts",
    "tj": f"apis/{GROUP}/{VERSION}/{{}}{PLURAL}",
    "tjh": f"apis/{GROUP}/{VERSION}/{{}}{HISTORY_PLURAL}",
    "tokenreview": "apis/authentication.k8s.io/v1/tokenreviews",
    "trainingjob": f"apis/{GROUP}/{VERSION}/{{}}{PLURAL}",
    "validatingadmissionpolicy": f"{_ADMISSION}/validatingadmissionpolicies",
    "validatingadmissionpolicybinding": f"{_ADMISSION}/validatingadmissionpolicybindings",
}
Object = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterApi:
    """The API server of one cluster.

    Objects go to `default` unless they, or the call, name a namespace. Every request raises
    kubernetes.client.ApiException if the server refuses it.

    `user` is whom an administrator speaks for; if empty, for itself.
    """

    kubeconfig: Path
    user: str = ""

    def speaking_for(self, user: str) -> ClusterApi:
        """The same, with the rights of another user."""
        return ClusterApi(kubeconfig=self.kubeconfig, user=user)

    def get(self, kind: str, name: str, namespace: str = "default") -> Any:
        """An object as JSON has it."""
        return self._call("GET", _path(kind, namespace, name))

    def list(self, kind: str, namespace: str = "default", labels: str = "") -> list[Any]:
        """The objects with these labels, as JSON has them."""
        return list(self._call("GET", _path(kind, namespace), query={"labelSelector": labels})["items"])

    def has(self, kind: str, name: str, namespace: str = "default") -> bool:
        """Whether there is such an object."""
        found = _unless((404,), lambda: self.get(kind, name, namespace))
        return found is not None

    def serves(self, *kinds: str) -> bool:
        """Whether it has these kinds."""
        return all(_unless((404,), partial(self.list, kind)) is not None for kind in kinds)

    def create(self, content: Object, namespace: str = "default", *, kept: bool = True, **query: str) -> Any:
        """Create an object, which is only tried if it isn't `kept`.

        Like kubectl's, fields that the server does not know are refused. `query` is more of the request.
        """
        query = {"fieldValidation": "Strict"} | _trial(kept) | query
        return self._call("POST", _path_of(content, namespace), content, query=query)

    def replace(self, content: Object, namespace: str = "default", *, kept: bool = True) -> Any:
        """Replace an object, as kubectl does."""
        path = f"{_path_of(content, namespace)}/{content['metadata']['name']}"
        return self._call("PUT", path, content, query={"fieldValidation": "Strict"} | _trial(kept))

    def apply(self, content: Object, namespace: str = "default", *, kept: bool = True) -> Any:
        """Create an object or have these fields in it, by a server-side apply that wins all conflicts."""
        path = f"{_path_of(content, namespace)}/{content['metadata']['name']}"
        query = {"fieldManager": "kubectl", "force": "true", "fieldValidation": "Strict"} | _trial(kept)
        return self._call("PATCH", path, json.dumps(content), query=query, media="application/apply-patch+yaml")

    def patch(
        self,
        kind: str,
        name: str,
        content: Any,
        namespace: str = "default",
        *,
        subresource: str = "",
        how: str = "merge",
        kept: bool = True,
    ) -> Any:
        """Merge `content` into an object; `how` is that of kubectl's `--type`."""
        path = f"{_path(kind, namespace, name)}/{subresource}".removesuffix("/")
        media = f"application/{'strategic-merge' if how == 'strategic' else how}-patch+json"
        return self._call("PATCH", path, content, query=_trial(kept), media=media)

    def delete(
        self, kind: str, name: str, namespace: str = "default", *, grace_seconds: int | None = None, kept: bool = True
    ) -> None:
        """Begin to delete an object; with a grace period of 0 it is gone at once."""
        options = {} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds}
        self._call("DELETE", _path(kind, namespace, name), options, query=_trial(kept))

    def delete_all(self, kind: str, namespace: str, *, grace_seconds: int | None = None) -> None:
        """Begin to delete all objects of a kind in a namespace."""
        options = {} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds}
        self._call("DELETE", _path(kind, namespace), options)

    def log(self, pod: str, namespace: str = "default", **query: str) -> str:
        """What a container of a pod has printed so far; empty before it begins, or before its node knows the pod."""
        path = f"{_path('pod', namespace, pod)}/log"
        return str(_unless((400, 404), lambda: self._call("GET", path, query=query, is_text=True)) or "")

    def token(self, account: str, namespace: str, *, audience: str = "", pod: str = "", uid: str = "") -> str:
        """A token of a service account: for an audience instead of the API server, bound to a pod, or both."""
        spec: Object = {"audiences": [audience]} if audience else {}
        if pod:
            bound = {"apiVersion": "v1", "kind": "Pod", "name": pod}
            spec["boundObjectRef"] = bound | ({"uid": uid} if uid else {})
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        answer = self._call("POST", f"{_path('serviceaccount', namespace, account)}/token", request)
        return str(answer["status"]["token"])

    def ready_nodes(self) -> set[str]:
        """Names of the nodes that are Ready."""
        return {
            node["metadata"]["name"]
            for node in self.list("node")
            if any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", []))
        }

    def _call(
        self,
        method: str,
        path: str,
        content: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        media: str = "application/json",
        is_text: bool = False,
    ) -> Any:
        client = _client(self.kubeconfig, self.kubeconfig.stat().st_mtime_ns)
        headers = {"Content-Type": media} | ({"Impersonate-User": self.user} if self.user else {})
        request = client.param_serialize(
            method,
            f"/{path}",
            header_params=headers,
            query_params=[item for item in (query or {}).items() if item[1]],
            body=content,
            auth_settings=["BearerToken"],
        )
        answer = client.call_api(*request)
        answer.read()
        if is_text and answer.status == 200:
            return answer.data.decode()
        return client.response_deserialize(answer, {"default": "object"}).data


def refusal(request: Callable[[], object]) -> str:
    """What the API server says against a request; empty if it does as asked."""
    from kubernetes.client import ApiException

    try:
        request()
    except ApiException as error:
        return str(json.loads(error.body or "")["message"])
    return ""


def _unless(statuses: tuple[int, ...], request: Callable[[], Any]) -> Any:
    """The answer, or None if the API server answers with one of these statuses."""
    from kubernetes.client import ApiException

    try:
        return request()
    except ApiException as error:
        if error.status not in statuses:
            raise
        return None


def _path(kind: str, namespace: str, name: str = "") -> str:
    return f"{PATHS[kind.lower()].format(f'namespaces/{namespace}/')}/{name}".removesuffix("/")


def _path_of(content: Object, namespace: str) -> str:
    return _path(content["kind"], content.get("metadata", {}).get("namespace", namespace))


def _trial(kept: bool) -> dict[str, str]:
    return {} if kept else {"dryRun": "All"}


@cache
def _client(kubeconfig: Path, changed_at: int) -> Any:
    import kubernetes  # takes a second and a half, and conftest.py loads this module for all tests

    # It writes the kubeconfig's keys to files; workers of pytest end without tidying up.
    config = yaml.safe_load(kubeconfig.read_text())
    return kubernetes.config.new_client_from_config_dict(config, temp_file_path=str(kubeconfig.parent))
