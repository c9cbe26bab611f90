"""The check of an installation: what it finds wrong, in sentences."""

from __future__ import annotations

import copy
from collections.abc import Callable
from email.message import Message
from io import BytesIO
from typing import Any
from urllib.error import HTTPError

import pytest

from spottrain_api import crd
from spottrain_api.contract.nodes import SPOT_LABELS
from spottrain_operator import selfcheck
from spottrain_operator.objects.definitions import crd_problem
from spottrain_operator.rights import asked, questions
from spottrain_watcher import azure

CRD: dict[str, Any] = crd.custom_resource_definition()


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The CRD's version with a change."""
    other = copy.deepcopy(CRD)
    change(other["spec"]["versions"][0])
    return other


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        pytest.param(CRD, "", id="this release's"),
        pytest.param(None, "no CRD trainingjobs.spottrain.dev. Upgrade the release with crds.enabled", id="none"),
        pytest.param(changed(lambda v: v.update(name="v1alpha0")), "does not serve v1alpha1", id="another version"),
        pytest.param(changed(lambda v: v.update(served=False)), "does not serve v1alpha1", id="not served"),
        pytest.param(
            changed(lambda v: v["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"].popitem()),
            "is that of another version. Upgrade the release that installs the CRDs (crds.enabled), or apply",
            id="a field less",
        ),
    ],
)
def test_the_crd_is_this_releases(found: dict[str, Any] | None, problem: str) -> None:
    told = crd_problem(found, crd.NAME)
    assert problem in told
    assert bool(told) is bool(problem)


def node(name: str, ready: str = "True", **labels: str) -> dict[str, Any]:
    status = {"conditions": [{"type": "Ready", "status": ready}]}
    return {"metadata": {"name": name, "labels": labels}, "status": status}


def watcher(on: str, ready: str = "True") -> dict[str, Any]:
    return {"spec": {"nodeName": on}, "status": {"conditions": [{"type": "Ready", "status": ready}]}}


EKS = {"eks.amazonaws.com/capacityType": "SPOT"}
GKE = {"cloud.google.com/gke-spot": "true"}


@pytest.mark.parametrize(
    ("nodes", "pods", "problem"),
    [
        pytest.param([node("a")], [], "", id="no spot node"),
        pytest.param([node("a", **EKS), node("b", **GKE)], [watcher("a"), watcher("b")], "", id="one on each"),
        pytest.param(
            [node("a", **EKS), node("b", **GKE)], [watcher("a")], "on 1 of 2 spot nodes: b.", id="one lacks"
        ),
        pytest.param([node("a", **EKS)], [watcher("a", "False")], "on 1 of 1 spot nodes: a.", id="not ready"),
        pytest.param([node("a", "Unknown", **EKS)], [], "", id="a node that is gone"),
        pytest.param(
            [node(f"n{i}", **EKS) for i in range(7)], [], "of 7 spot nodes: n0, n1, n2, n3, n4 …", id="many"
        ),
    ],
)
def test_each_spot_node_has_a_watcher(nodes: list[Any], pods: list[Any], problem: str) -> None:
    found = selfcheck.watchers_problem(nodes, pods, SPOT_LABELS, {})
    assert problem in found
    assert bool(found) is bool(problem)


GPU = {"pool": "gpu"}


def asking(**expression: Any) -> dict[str, Any]:
    return {"nodeSelectorTerms": [{"matchExpressions": [{"key": "pool", **expression}]}]}


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param({"nodeSelector": GPU}, id="node selector"),
        pytest.param(asking(operator="In", values=["gpu"]), id="In"),
        pytest.param(
            {"nodeSelectorTerms": [{"matchExpressions": [{"key": "cpu", "operator": "DoesNotExist"}]}]},
            id="DoesNotExist",
        ),
        pytest.param(asking(operator="Exists"), id="Exists"),
    ],
)
def test_a_spot_node_that_the_watchers_placement_leaves_out_needs_none(placement: dict[str, Any]) -> None:
    nodes = [node("a", **EKS, **GPU), node("b", **EKS, cpu="only")]
    assert selfcheck.watchers_problem(nodes, [watcher("a")], SPOT_LABELS, placement) == ""
    assert "on 1 of 1 spot nodes: a." in selfcheck.watchers_problem(nodes, [], SPOT_LABELS, placement)


def test_a_placement_by_fields_of_nodes_is_not_read() -> None:
    placement = {
        "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["b"]}]}]
    }
    assert selfcheck.watchers_problem([node("a", **EKS)], [], SPOT_LABELS, placement) == ""


def test_what_is_denied_is_named_as_kubectl_names_it() -> None:
    in_words = [asked(each) for each in questions("operator", "spottrain-system")]
    assert "update trainingjobs.spottrain.dev/status" in in_words
    assert "update leases.coordination.k8s.io spottrain-operator in spottrain-system" in in_words
    assert "create pods" in in_words
    assert "get /openid/v1/jwks" in in_words
    sentence = selfcheck.denied_problem(in_words[:2], "operator")
    assert sentence.startswith("the service account of the operator may not get trainingjobs.spottrain.dev, list ")
    assert selfcheck.denied_problem([], "operator") == ""


def raising(error: Exception) -> Callable[[], str]:
    def check() -> str:
        raise error

    return check


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (HTTPError("https://api", 403, "Forbidden", Message(), BytesIO()), "the API server answers 403 Forbidden"),
        (ConnectionRefusedError("refused"), "the API server can't be reached: refused"),
    ],
)
def test_an_api_server_that_does_not_answer_is_a_problem(error: Exception, problem: str) -> None:
    assert problem in selfcheck.tried(raising(error))


def test_helm_test_outlasts_the_first_answer_of_every_cloud() -> None:
    helms_own_timeout = 300.0
    assert azure.FIRST_ANSWER_SECONDS < selfcheck.PATIENCE_SECONDS < helms_own_timeout


def test_it_waits_for_what_starts_and_says_how_each_check_ended() -> None:
    answers = iter(["not yet", ""])
    said: list[str] = []
    assert selfcheck.run([("it starts", lambda: next(answers))], 60, said.append)
    assert not selfcheck.run([("it works", lambda: "it is broken"), ("it is there", lambda: "")], 0, said.append)
    assert said == ["ok: it starts", "FAILED: it works: it is broken", "ok: it is there"]
