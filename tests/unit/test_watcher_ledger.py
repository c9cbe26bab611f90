"""The ledger and the mark on the Node: properties over any order of signals."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain_api.contract.names import ANNOTATION_NOTICE, ANNOTATION_WATCHER, TAINT_PREEMPTION
from spottrain_api.contract.notices import POD_NOTICE_PREFIX, Notice, NoticeKind
from spottrain_watcher.ledger import Ledger
from spottrain_watcher.node_marker import desired_change
from spottrain_watcher.provider import Provider, UnknownProvider, detect_provider, provider_from_environment

START = datetime(2026, 1, 1, tzinfo=UTC)


def notice(id_: str = "1", kind: NoticeKind = NoticeKind.PREEMPT, seconds: float = 120, seen: float = 0) -> Notice:
    return Notice(
        id=id_,
        node="n",
        kind=kind,
        source="ec2",
        deadline=START + timedelta(seconds=seconds),
        observed_at=START + timedelta(seconds=seen),
    )


notices = st.builds(
    notice,
    id_=st.sampled_from(["1", "2", "3", "pod/u"]),
    kind=st.sampled_from(NoticeKind),
    seconds=st.integers(0, 300),
    seen=st.integers(0, 10),
)
words = st.lists(
    st.tuples(st.sampled_from(["ec2", "kubernetes"]), st.lists(notices, max_size=3).map(tuple)), max_size=8
)


def told(history: list[tuple[str, tuple[Notice, ...]]]) -> Ledger:
    ledger = Ledger()
    for second, (source, announced) in enumerate(history):
        ledger = ledger.observe(source, announced, START + timedelta(seconds=second))
    return ledger


@given(words)
def test_what_stands_is_what_the_sources_said_last(history: list[tuple[str, tuple[Notice, ...]]]) -> None:
    last = dict(history)
    standing = told(history).standing()
    assert {n.id for n in standing} == {n.id for announced in last.values() for n in announced}
    assert [n.deadline for n in standing] == sorted(n.deadline for n in standing)


@given(words)
def test_reporting_the_same_again_changes_nothing(history: list[tuple[str, tuple[Notice, ...]]]) -> None:
    ledger = told(history)
    for source, announced in dict(history).items():
        again = ledger.observe(source, announced, START + timedelta(seconds=len(history)))
        assert again.notice_list() == ledger.notice_list()


@given(words)
def test_a_notice_is_never_both_standing_and_cancelled(history: list[tuple[str, tuple[Notice, ...]]]) -> None:
    ledger = told(history)
    listed = ledger.notice_list().notices
    assert len({n.id for n in listed}) == len(listed)
    assert {n.id for n in listed if not n.cancelled} == {n.id for n in ledger.standing()}


def test_a_repeated_notice_keeps_its_first_sighting_and_its_earliest_deadline() -> None:
    ledger = told([("ec2", (notice(seconds=120, seen=0),)), ("ec2", (notice(seconds=180, seen=5),))])
    assert ledger.standing() == (notice(seconds=120, seen=0),)


def test_a_withdrawn_notice_is_repeated_as_cancelled_for_a_while() -> None:
    ledger = told([("ec2", (notice(),)), ("ec2", ())])
    assert [n.cancelled for n in ledger.notice_list().notices] == [True]
    later = ledger.observe("ec2", (), START + timedelta(minutes=10))
    assert later.notice_list().notices == ()


def test_a_notice_that_another_source_still_gives_is_not_cancelled() -> None:
    ledger = told([("ec2", (notice(),)), ("kubernetes", (notice(),)), ("ec2", ())])
    assert [n.cancelled for n in ledger.notice_list().notices] == [False]


def test_the_node_shows_that_it_goes_rather_than_that_it_may_and_never_a_pods_notice() -> None:
    pod = notice(POD_NOTICE_PREFIX + "u", NoticeKind.EVICT, seconds=1)
    hint = notice("hint", NoticeKind.REBALANCE, seconds=10)
    end = notice("end", NoticeKind.PREEMPT, seconds=120)
    assert told([("ec2", (pod,))]).for_node() is None
    assert told([("ec2", (pod, hint))]).for_node() == hint
    assert told([("ec2", (pod, hint, end))]).for_node() == end


def node(annotations: dict[str, str] | None = None, taints: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "n",
            "resourceVersion": "7",
            "annotations": {ANNOTATION_WATCHER: "mark"} | (annotations or {}),
        },
        "spec": {"taints": taints or []},
    }


SPOT_TAINT = {"key": "kubernetes.azure.com/scalesetpriority", "value": "spot", "effect": "NoSchedule"}
OUR_TAINT = {"key": TAINT_PREEMPTION, "effect": "NoSchedule"}


def test_marking_adds_annotation_and_taint_and_keeps_other_taints() -> None:
    patch = desired_change(node(taints=[SPOT_TAINT]), notice(), "mark")
    assert patch is not None
    assert patch["metadata"]["resourceVersion"] == "7"
    assert json.loads(patch["metadata"]["annotations"][ANNOTATION_NOTICE])["id"] == "1"
    assert patch["spec"]["taints"] == [SPOT_TAINT, OUR_TAINT]


def test_a_node_that_is_marked_right_is_left_alone() -> None:
    marked = node({ANNOTATION_NOTICE: notice().to_json()}, [SPOT_TAINT, OUR_TAINT])
    assert desired_change(marked, notice(), "mark") is None
    assert desired_change(node(taints=[SPOT_TAINT]), None, "mark") is None


def test_a_cancelled_notice_removes_annotation_and_taint() -> None:
    marked = node({ANNOTATION_NOTICE: notice().to_json()}, [SPOT_TAINT, OUR_TAINT])
    patch = desired_change(marked, None, "mark")
    assert patch is not None
    assert patch["metadata"]["annotations"] == {ANNOTATION_NOTICE: None}
    assert patch["spec"]["taints"] == [SPOT_TAINT]


def test_a_recommendation_is_annotated_but_not_tainted() -> None:
    patch = desired_change(node(), notice(kind=NoticeKind.REBALANCE), "mark")
    assert patch is not None
    assert "spec" not in patch


@pytest.mark.parametrize(
    ("name", "provider"),
    [
        *[(name, Provider.EC2) for name in ("ec2", "eks", "aws", "EKS")],
        *[(name, Provider.GCE) for name in ("gce", "gke")],
        *[(name, Provider.AZURE) for name in ("azure", "aks")],
        ("other", Provider.OTHER),
    ],
)
def test_a_provider_that_is_named(name: str, provider: Provider) -> None:
    assert provider_from_environment({"SPOTTRAIN_PROVIDER": name}) is provider


def test_no_provider_is_named() -> None:
    assert provider_from_environment({}) is None
    assert provider_from_environment({"SPOTTRAIN_PROVIDER": ""}) is None


def test_an_unknown_provider_is_refused_with_a_sentence() -> None:
    with pytest.raises(
        UnknownProvider, match=r"^SPOTTRAIN_PROVIDER: 'gcp' is not a provider\. Set one of ec2, .*aks"
    ):
        provider_from_environment({"SPOTTRAIN_PROVIDER": "gcp"})


@pytest.mark.parametrize(
    ("provider_id", "label", "provider"),
    [
        ("aws:///eu-west-1a/i-0", "cloud.google.com/gke-spot", Provider.EC2),
        ("gce://project/us-central1-a/gke-pool-1", None, Provider.GCE),
        ("azure:///subscriptions/0/virtualMachineScaleSets/aks/virtualMachines/0", None, Provider.AZURE),
        ("k3s://node", None, Provider.OTHER),
        (None, "eks.amazonaws.com/capacityType", Provider.EC2),
        (None, "karpenter.k8s.aws/instance-family", Provider.EC2),
        (None, "cloud.google.com/gke-spot", Provider.GCE),
        (None, "kubernetes.azure.com/scalesetpriority", Provider.AZURE),
        (None, "karpenter.sh/capacity-type", Provider.OTHER),
        (None, None, Provider.OTHER),
    ],
)
def test_a_provider_that_is_detected(provider_id: str | None, label: str | None, provider: Provider) -> None:
    found = {"metadata": {"labels": {label: "x"} if label else None}, "spec": {"providerID": provider_id or ""}}
    assert detect_provider(found) is provider
