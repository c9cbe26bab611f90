"""Events of a job, in the order in which they were recorded."""

from __future__ import annotations

from memory_cluster import MemoryCluster
from spottrain_operator.cluster.events import EventRecorder
from spottrain_operator.core.model import Event

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
