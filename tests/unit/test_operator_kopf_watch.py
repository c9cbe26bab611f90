"""What kopf shows of jobs, as events for the cache."""

from __future__ import annotations

from typing import Any

import pytest

from spottrain_operator.cluster.client import ExpiredError
from spottrain_operator.cluster.kopf_watch import JobEvents


def raw(type: str | None, version: int, uid: str = "u1") -> dict[str, Any]:
    return {"type": type, "object": {"metadata": {"name": "gpt", "uid": uid, "resourceVersion": str(version)}}}


def test_jobs_that_are_there_and_what_becomes_of_them_are_shown() -> None:
    events = JobEvents()
    found = [events.take(each) for each in (raw(None, 3), raw("MODIFIED", 5), raw("DELETED", 6))]
    assert [(each.version, each.deleted) for each in found] == [(3, False), (5, False), (6, True)]


def test_a_job_that_is_listed_again_expires_the_watch() -> None:
    """After an interruption, kopf lists again, without what was deleted meanwhile."""
    events = JobEvents()
    events.take(raw(None, 3))
    events.take(raw("ADDED", 4, uid="u2"))
    with pytest.raises(ExpiredError):
        events.take(raw(None, 4, uid="u2"))


def test_a_job_that_was_deleted_may_be_listed_under_its_name() -> None:
    events = JobEvents()
    events.take(raw("ADDED", 3))
    events.take(raw("DELETED", 4))
    assert not events.take(raw(None, 7, uid="u2")).deleted
