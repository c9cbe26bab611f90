"""`python -m spottrain_operator.selfcheck PART`: check an installation.

The check sees the installation from a pod of it. `helm test` runs it with the service account of the operator, and
with that of the watcher.
"""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

import click
import kubernetes.client as k8s
import urllib3

from spottrain_api import crd
from spottrain_api.contract import ENV_CONTROL_URL, SPOT_LABELS, VERSION
from spottrain_operator.cluster.client import ClusterError, Manifest
from spottrain_operator.cluster.definitions import crd_problem
from spottrain_operator.cluster.kubernetes_client import client_configuration
from spottrain_operator.control_api.certificate_keeper import CA, SECRET_NAME, decoded
from spottrain_operator.options import spot_labels_option, watch_namespaces_option
from spottrain_operator.rights import RIGHTS, asked, questions

TIMEOUT_SECONDS = 15.0
RETRY_SECONDS = 1.0
# A watcher is ready once its sources answer. Azure's takes two minutes for the first answer in a new scale set. Helm
# itself waits for five.
PATIENCE_SECONDS = 180.0

Check = tuple[str, Callable[[], str]]
"""What is checked, and a function that returns what is wrong with it, or nothing."""


def denied_problem(denied: Sequence[str], part: str) -> str:
    """What the service account of a part may not do."""
    if not denied:
        return ""
    return (
        f"the service account of the {part} may not {', '.join(denied)}. "
        "The image may be newer than the chart: upgrade both to the same release."
    )


def watchers_problem(nodes: Iterable[Manifest], pods: Iterable[Manifest], spot_labels: Mapping[str, str]) -> str:
    """Which nodes with one of `spot_labels` have no watcher, if any.

    Nodes that are not ready are left out.
    """
    watched = {pod["spec"].get("nodeName") for pod in pods if _has(pod, "Ready")}
    spot = [node["metadata"]["name"] for node in nodes if _is_spot(node, spot_labels) and _has(node, "Ready")]
    if missing := sorted(set(spot) - watched):
        return (
            f"no watcher is ready on {len(missing)} of {len(spot)} spot nodes: {', '.join(missing[:5])}"
            f"{' …' if len(missing) > 5 else ''}. See `kubectl describe daemonset` in the release's namespace; "
            "Pod Security there must allow the host network (privileged)."
        )
    return ""


def _is_spot(node: Manifest, spot_labels: Mapping[str, str]) -> bool:
    labels = node["metadata"].get("labels") or {}
    return any(labels.get(key) == value for key, value in spot_labels.items())


def _has(thing: Manifest, condition: str) -> bool:
    conditions = (thing.get("status") or {}).get("conditions") or ()
    return any(each["type"] == condition and each["status"] == "True" for each in conditions)


class Installation:
    """An installed release, as its service accounts see it."""

    def __init__(
        self,
        client: k8s.ApiClient,
        *,
        namespace: str,
        url: str,
        spot_labels: Mapping[str, str],
        watched: Sequence[str] = (),
    ) -> None:
        self._authorization = k8s.AuthorizationV1Api(client)
        self._core = k8s.CoreV1Api(client)
        self._extensions = k8s.ApiextensionsV1Api(client)
        self._namespace = namespace
        self._url = url
        self._spot_labels = spot_labels
        self._watched = watched

    def checks(self, part: str, watchers: str) -> list[Check]:
        """The checks with the service account of a part.

        `watchers` are the labels of the watcher's pods, if any.
        """
        found: list[Check] = [(f"the {part} has its rights", lambda: self._rights(part))]
        if part == "operator":
            found += [
                ("the operator is alive", lambda: self._answers("/healthz")),
                ("the operator leads and has observed the cluster", lambda: self._answers("/readyz")),
                *((f"the cluster serves {name} {VERSION}", partial(self._crd, name)) for name in crd.definitions()),
            ]
        if part == "operator" and watchers:
            found.append(("a watcher is ready on each spot node", lambda: self._watchers(watchers)))
        return found

    def _answers(self, path: str) -> str:
        try:
            urllib.request.urlopen(self._url + path, timeout=TIMEOUT_SECONDS, context=self._trust()).close()
        except ssl.SSLError as error:
            return f"the Secret {SECRET_NAME} in {self._namespace} holds no usable {CA}: {error}"
        except urllib.error.HTTPError as error:
            return f"{self._url}{path} answers {error.code}: {error.read(300).decode(errors='replace')}"
        except OSError as error:
            return (
                f"{self._url}{path} can't be reached: {error}. Look at the operator's pod with `kubectl describe` "
                "and `kubectl logs`, and at network policies of its namespace."
            )
        return ""

    def _trust(self) -> ssl.SSLContext:
        """What the release's pods trust."""
        secret = _json(self._core.read_namespaced_secret, SECRET_NAME, self._namespace)
        return ssl.create_default_context(cadata=decoded(secret).get(CA) or None)

    def _crd(self, name: str) -> str:
        try:
            found = _json(self._extensions.read_custom_resource_definition, name)
        except k8s.ApiException as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            found = None
        return crd_problem(found, name)

    def _watchers(self, labels: str) -> str:
        pods = _items(self._core.list_namespaced_pod, self._namespace, label_selector=labels)
        return watchers_problem(_items(self._core.list_node), pods, self._spot_labels)

    def _rights(self, part: str) -> str:
        denied = [asked(each) for each in questions(part, self._namespace, self._watched) if not self._may(each)]
        return denied_problem(denied, part)

    def _may(self, question: dict[str, str]) -> bool:
        of = "nonResourceAttributes" if "path" in question else "resourceAttributes"
        review = {"spec": {of: question}}
        answer = _json(self._authorization.create_self_subject_access_review, review)
        return bool(answer["status"]["allowed"])


def _json(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Manifest:
    answer: Manifest = json.loads(
        method(*args, _preload_content=False, _request_timeout=TIMEOUT_SECONDS, **kwargs).data
    )
    return answer


def _items(method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Manifest]:
    return list(_json(method, *args, **kwargs)["items"])


def tried(check: Callable[[], str]) -> str:
    """The problem that a check finds; an API server that does not answer is one."""
    try:
        return check()
    except k8s.ApiException as error:
        return f"the API server answers {error.status} {error.reason}: {error.body}"
    except (urllib3.exceptions.HTTPError, OSError) as error:
        return f"the API server can't be reached: {error}"


def run(checks: Sequence[Check], patience_seconds: float, say: Callable[[str], None]) -> bool:
    """Try each check until it passes or the time is up. Whether all passed."""
    deadline = time.monotonic() + patience_seconds
    passed = True
    for title, check in checks:
        while (problem := tried(check)) and time.monotonic() < deadline:
            time.sleep(RETRY_SECONDS)
        passed = passed and not problem
        say(f"FAILED: {title}: {problem}" if problem else f"ok: {title}")
    return passed


@click.command()
@click.argument("part", type=click.Choice(list(RIGHTS)))
@click.option("--url", envvar=ENV_CONTROL_URL, required=True, help="Address of the operator's control API.")
@click.option("--namespace", envvar="POD_NAMESPACE", required=True, help="Namespace of the release.")
@click.option("--watchers", default="", help="Labels of the watcher's pods. Without it, they are not looked for.")
@spot_labels_option
@watch_namespaces_option
@click.option(
    "--patience",
    default=PATIENCE_SECONDS,
    help=f"Seconds to wait for what is still starting. Default: {PATIENCE_SECONDS:.0f}.",
)
def main(
    part: str,
    url: str,
    namespace: str,
    watchers: str,
    spot_labels: dict[str, str],
    watch_namespaces: tuple[str, ...],
    patience: float,
) -> None:
    """Check that an installation works. Ends with status 1 if it does not."""
    try:
        client = k8s.ApiClient(client_configuration())
    except ClusterError as error:
        raise click.ClickException(str(error)) from error
    release = Installation(
        client,
        namespace=namespace,
        url=url.rstrip("/"),
        spot_labels={**SPOT_LABELS, **spot_labels},
        watched=watch_namespaces,
    )
    if not run(release.checks(part, watchers), patience, click.echo):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
