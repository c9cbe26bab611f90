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
from urllib.parse import urlencode

import click
import kopf

from spottrain_api import crd
from spottrain_api.contract.names import ENV_CONTROL_URL, VERSION
from spottrain_api.contract.nodes import SPOT_LABELS
from spottrain_operator.control_api.certificate_keeper import CA, SECRET_NAME, ca_of, decoded
from spottrain_operator.kube.api_server import JSON, connection_info
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.resources import ACCESS_REVIEWS, DEFINITIONS, NODES, PODS, SECRETS, Manifest
from spottrain_operator.objects.definitions import crd_problem
from spottrain_operator.objects.placement import fits
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


def watchers_problem(
    nodes: Iterable[Manifest], pods: Iterable[Manifest], spot_labels: Mapping[str, str], placement: Manifest
) -> str:
    """Which nodes with one of `spot_labels` have no watcher, if any.

    Nodes that are not ready are left out, and those that the watcher's `placement` leaves out: its nodeSelector and
    its nodeSelectorTerms.
    """
    watched = {pod["spec"].get("nodeName") for pod in pods if _is_ready(pod)}
    spot = [
        node["metadata"]["name"]
        for node in nodes
        if _is_spot(node, spot_labels) and _is_selected(node, placement) and _is_ready(node)
    ]
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


def _is_selected(node: Manifest, placement: Manifest) -> bool:
    labels = node["metadata"].get("labels") or {}
    if not (placement.get("nodeSelector") or {}).items() <= labels.items():
        return False
    terms = placement.get("nodeSelectorTerms")
    # What a term asks of a node's fields is not read: the node may be left out.
    expressions = [term.get("matchExpressions") for term in terms or () if not term.get("matchFields")]
    return not terms or any(each and all(fits(one, labels) for one in each) for each in expressions)


def _is_ready(thing: Manifest) -> bool:
    conditions = (thing.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


class Api:
    """One request to the API server after the other."""

    def __init__(self, info: kopf.ConnectionInfo) -> None:
        self._info = info
        self._trust = info.as_ssl_context()

    def ask(self, path: str, body: Manifest | None = None) -> Manifest:
        """Read an object or, with a body, create one.

        Raises:
            OSError: There was no answer or, as urllib.error.HTTPError, it was a refusal.
        """
        request = urllib.request.Request(
            self._info.server.rstrip("/") + path,
            data=None if body is None else json.dumps(body).encode(),
            headers=self._info.as_http_headers() | {"Content-Type": JSON},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS, context=self._trust) as response:
            answer: Manifest = json.load(response)
            return answer


class Installation:
    """An installed release, as its service accounts see it."""

    def __init__(
        self,
        api: Api,
        *,
        namespace: str,
        url: str,
        spot_labels: Mapping[str, str],
        placement: Manifest,
        watched: Sequence[str] = (),
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._url = url
        self._spot_labels = spot_labels
        self._placement = placement
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
        secret = self._api.ask(SECRETS.path(self._namespace, SECRET_NAME))
        return ssl.create_default_context(cadata=ca_of(decoded(secret)) or None)

    def _crd(self, name: str) -> str:
        try:
            found = self._api.ask(DEFINITIONS.path(name=name))
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
            found = None
        return crd_problem(found, name)

    def _watchers(self, labels: str) -> str:
        pods = self._api.ask(f"{PODS.path(self._namespace)}?{urlencode({'labelSelector': labels})}")
        nodes = self._api.ask(NODES.path())
        return watchers_problem(nodes["items"], pods["items"], self._spot_labels, self._placement)

    def _rights(self, part: str) -> str:
        denied = [asked(each) for each in questions(part, self._namespace, self._watched) if not self._may(each)]
        return denied_problem(denied, part)

    def _may(self, question: dict[str, str]) -> bool:
        of = "nonResourceAttributes" if "path" in question else "resourceAttributes"
        review = {"spec": {of: question}}
        answer = self._api.ask(ACCESS_REVIEWS.path(), review)
        return bool(answer["status"]["allowed"])


def tried(check: Callable[[], str]) -> str:
    """The problem that a check finds; an API server that does not answer is one."""
    try:
        return check()
    except urllib.error.HTTPError as error:
        return f"the API server answers {error.code} {error.reason}: {error.read().decode(errors='replace')}"
    except OSError as error:
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
@click.option("--placement", default="{}", help="JSON with nodeSelector and nodeSelectorTerms of the watcher's pods.")
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
    placement: str,
    spot_labels: dict[str, str],
    watch_namespaces: tuple[str, ...],
    patience: float,
) -> None:
    """Check that an installation works. Ends with status 1 if it does not."""
    try:
        api = Api(connection_info())
    except ClusterError as error:
        raise click.ClickException(str(error)) from error
    release = Installation(
        api,
        namespace=namespace,
        url=url.rstrip("/"),
        spot_labels={**SPOT_LABELS, **spot_labels},
        placement=json.loads(placement),
        watched=watch_namespaces,
    )
    if not run(release.checks(part, watchers), patience, click.echo):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
