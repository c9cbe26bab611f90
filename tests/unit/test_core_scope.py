"""Which namespaces an operator leads, and whether two would lead the same."""

from __future__ import annotations

import pytest

from spottrain_operator.kube.scope import Scope

ALL = Scope()


def named(*names: str) -> Scope:
    return Scope(names=frozenset(names))


def labelled(**labels: str) -> Scope:
    return Scope(labels=labels)


@pytest.mark.parametrize(
    ("scope", "name", "labels", "contained"),
    [
        (ALL, "team", {}, True),
        (named("team", "other"), "team", {}, True),
        (named("team"), "team-b", {}, False),
        (labelled(fleet="a"), "team", {"fleet": "a", "more": "b"}, True),
        (labelled(fleet="a"), "team", {"fleet": "b"}, False),
        (labelled(fleet="a"), "team", {}, False),
        (labelled(fleet="a", kind="b"), "team", {"fleet": "a"}, False),
    ],
)
def test_whether_a_namespace_is_led(scope: Scope, name: str, labels: dict[str, str], contained: bool) -> None:
    assert scope.contains(name, labels) is contained


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        (ALL, ALL, True),
        (ALL, named("team"), True),
        (ALL, labelled(fleet="a"), True),
        (named("team"), named("team", "other"), True),
        (named("team"), named("other"), False),
        (labelled(fleet="a"), labelled(fleet="a", kind="b"), True),
        (labelled(fleet="a"), labelled(fleet="b"), False),
        (labelled(fleet="a"), labelled(kind="b"), True),
        (labelled(fleet="a", kind="b"), labelled(fleet="b", kind="b"), False),
        (named("team"), labelled(fleet="a"), True),
    ],
)
def test_whether_two_would_lead_one_namespace(one: Scope, other: Scope, overlap: bool) -> None:
    assert one.overlaps(other) is overlap
    assert other.overlaps(one) is overlap


@pytest.mark.parametrize("scope", [ALL, named("a", "b"), labelled(a="b", c="d")])
def test_a_scope_is_written_and_read(scope: Scope) -> None:
    assert Scope.from_json(scope.to_json()) == scope


@pytest.mark.parametrize("text", [None, "", "x", "[]", "7", '{"names": 7}', '{"labels": 7}'])
def test_what_nobody_wrote_stands_for_all_namespaces(text: str | None) -> None:
    assert Scope.from_json(text) == ALL
