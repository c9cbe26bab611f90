"""Events of a job, in the order in which they were recorded."""

from __future__ import annotations

import pytest

from spottrain_operator.core.model import Event
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.resources import EVENTS
from spottrain_operator.objects.events import EventRecorder
from world.cluster import MemoryCluster
from world.faults import Fault

JOB = {"metadata": {"namespace": "default", "name": "gpt", "uid": "u"}}


async def test_events_of_one_second_are_listed_in_their_order() -> None:
    """The API server lists by name, and kubectl sorts by seconds alone."""
    cluster = MemoryCluster()
    recorder = EventRecorder(cluster)
    messages = [f"step {number}" for number in range(40)]
    for message in messages:
        await recorder.record(JOB, Event(type="Normal", reason="GenerationStarted", message=message))
    by_name = sorted(cluster.events, key=lambda event: event["metadata"]["name"])
    assert [event["message"] for event in by_name] == messages
    assert [event["message"] for event in sorted(cluster.events, key=lambda event: event["eventTime"])] == messages


async def test_an_event_that_can_not_be_written_is_in_the_log_and_holds_up_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = MemoryCluster()
    busy = Fault(error=ClusterError("too many requests", retry_after=1.0), resource=EVENTS)
    cluster.before.append(busy)
    recorder = EventRecorder(cluster)
    await recorder.record(JOB, Event(type="Normal", reason="NodeLost", message=""))
    busy.error = None
    await recorder.record(JOB, Event(type="Normal", reason="PodsCreated", message=""))
    assert [event["reason"] for event in cluster.events] == ["PodsCreated"]
    assert "gpt: the event NodeLost is in this log alone: too many requests" in caplog.messages
