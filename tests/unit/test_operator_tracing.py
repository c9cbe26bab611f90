"""The trace of a change of members.

It goes from the cloud's word to the next generation's first step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from scene import NOW, Scene, notice, training_job
from spottrain_api.contract.notices import NoticeKind
from spottrain_api.contract.reports import CommitRef
from spottrain_api.v1alpha1.status import GenerationState, TrainingJobStatus, Transition
from spottrain_operator.core.model import Observed
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.tracing import (
    ENDPOINTS,
    ChangeTracer,
    Request,
    parts_of,
    processor_from_environment,
    request_of,
)

KEY = JobKey(namespace="team", name="gpt")


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def seen(status: TrainingJobStatus, scene: Scene | None = None) -> Observed:
    """What a pass saw of the job with this status."""
    observed = (scene or training_job()).observed
    return replace(observed, job=replace(observed.job, status=status))


def draining(reason: str = "Preempted") -> TrainingJobStatus:
    ending = {"state": GenerationState.DRAINING, "requested_at": at(0.5), "reason": reason}
    status = training_job().generation(**ending).observed.job.status
    return status.model_copy(update={"transitions": ()})


def trained_on(seconds_without_step: float | None = 3.0) -> TrainingJobStatus:
    """The status after the drain, and after the next generation's first step."""
    status = draining()
    assert status.generation is not None
    transition = Transition(
        generation=status.generation.number,
        reason="Preempted",
        message="node n4 goes",
        with_notice=True,
        at=at(2.0),
        last_step=120,
        last_step_at=at(1.0),
        steps_redone=0,
        seconds_without_step=seconds_without_step,
        world_size_before=4,
        world_size_after=3,
    )
    following = status.generation.model_copy(
        update={"number": status.generation.number + 1, "requested_at": None, "started_at": at(2.2)}
    )
    return status.model_copy(
        update={
            "generation": following,
            "transitions": (transition,),
            "commit": CommitRef(generation=1, step=120, manifest="m", committed_at=at(1.6)),
        }
    )


def test_a_notice_is_one_trace_to_the_next_first_step() -> None:
    exporter = InMemorySpanExporter()
    tracer = ChangeTracer(SimpleSpanProcessor(exporter))
    requests: dict[int, Request] = {}
    scene = training_job().says(4, notices=(notice(4).model_copy(update={"observed_at": at(0)}),))
    tracer.passed(KEY, requests, seen(draining(), scene), draining())
    tracer.passed(KEY, requests, seen(draining()), trained_on(None))
    assert exporter.get_finished_spans() == ()
    tracer.passed(KEY, requests, seen(trained_on(None)), trained_on())
    tracer.passed(KEY, requests, seen(trained_on()), trained_on())
    *parts, root = exporter.get_finished_spans()
    assert root.name == "change of members: Preempted"
    assert {span.parent.span_id for span in parts if span.parent is not None} == {root.context.span_id}
    assert len({span.context.trace_id for span in (*parts, root)}) == 1

    def seconds(nanoseconds: int | None) -> float:
        assert nanoseconds is not None
        return round(nanoseconds / 1e9 - NOW.timestamp(), 3)

    assert [(span.name, seconds(span.start_time), seconds(span.end_time)) for span in parts] == [
        ("notice to last step", 0.0, 1.0),
        ("commit", 1.0, 1.6),
        ("end of the generation", 1.6, 2.0),
        ("forming the next generation", 2.0, 2.2),
        ("start and resume", 2.2, 4.0),
    ]
    assert (seconds(root.start_time), seconds(root.end_time)) == (0.0, 4.0)
    attributes = dict(root.attributes or {})
    assert (attributes["spottrain.job"], attributes["spottrain.last_step"]) == ("gpt", 120)
    assert attributes["spottrain.source"] == notice(4).source


def test_each_of_two_changes_in_a_row_has_its_own_notice() -> None:
    """Generation 2 gets a notice before its first step."""
    before = num_requests()
    exporter = InMemorySpanExporter()
    tracer = ChangeTracer(SimpleSpanProcessor(exporter))
    requests: dict[int, Request] = {}
    first, following = draining(), trained_on(None)
    assert first.generation is not None
    second = first.generation.model_copy(update={"number": 2, "requested_at": at(5.5)})
    following = following.model_copy(update={"generation": second})
    [opened] = following.transitions
    both = (opened, opened.model_copy(update={"generation": 2, "at": at(6), "last_step_at": at(6)}))
    last = following.model_copy(update={"transitions": both})
    closed = tuple(each.model_copy(update={"seconds_without_step": 3.0}) for each in both)
    noticed = training_job().says(4, notices=(notice(4, observed_at=at(0), source="ec2"),))
    tracer.passed(KEY, requests, seen(first, noticed), first)
    noticed = training_job().says(3, notices=(notice(3, observed_at=at(5), source="gce"),))
    tracer.passed(KEY, requests, seen(following, noticed), following)
    tracer.passed(KEY, requests, seen(last), last.model_copy(update={"generation": None, "transitions": closed}))
    spans = exporter.get_finished_spans()
    roots = [span.attributes["spottrain.source"] for span in spans if span.parent is None and span.attributes]
    assert roots == ["ec2", "gce"]
    begun = [span.start_time for span in spans if span.name == "notice to last step"]
    assert begun == [int(at(seconds).timestamp() * 1e9) for seconds in (0, 5)]
    assert num_requests() == before, "what is written is no longer kept"


def num_requests() -> int:
    gc.collect()
    return sum(type(each) is Request for each in gc.get_objects())


def test_only_the_notice_that_made_the_drain_is_in_the_trace() -> None:
    an_hour_ago, stranger = at(-3600), 9
    scene = training_job().says(2, notices=(notice(2, observed_at=an_hour_ago, kind=NoticeKind.REBALANCE),))
    scene = scene.says(3, notices=(notice(3, observed_at=an_hour_ago, cancelled=True),))
    scene = scene.says(stranger, notices=(notice(stranger, observed_at=an_hour_ago),))
    scene = scene.says(4, notices=(notice(4, observed_at=at(0), source="gce"),))
    request = request_of(draining(), scene.observed)
    assert request is not None
    assert (request.noticed_at, request.source) == (at(0), "gce")


@pytest.mark.parametrize("reason", ["Grow", "Edited", "Suspended"])
def test_a_drain_that_no_notice_made_has_none_in_its_trace(reason: str) -> None:
    request = request_of(draining(reason), training_job().says(4, notices=(notice(4),)).observed)
    assert request is not None
    assert (request.noticed_at, request.source) == (None, "")


def test_an_operator_that_started_in_between_traces_from_the_last_step() -> None:
    exporter = InMemorySpanExporter()
    ChangeTracer(SimpleSpanProcessor(exporter)).passed(KEY, {}, seen(trained_on(None)), trained_on())
    assert [span.name for span in exporter.get_finished_spans()][:2] == ["commit", "end of the generation"]


@pytest.mark.parametrize("number", [2, 39], ids=["the-next-number", "above-an-earlier-job"])
def test_forming_the_next_generation_is_a_part_whatever_its_number(number: int) -> None:
    status = trained_on()
    assert status.generation is not None
    status = status.model_copy(update={"generation": status.generation.model_copy(update={"number": number})})
    [transition] = status.transitions
    assert "forming the next generation" in [part.name for part in parts_of(transition, status, None)]


def test_only_the_newest_of_two_changes_formed_the_newest_generation() -> None:
    """The generation between the two has ended without a step."""
    status = trained_on()
    [first] = status.transitions
    assert status.generation is not None
    newest = status.generation.model_copy(update={"number": 3})
    second = first.model_copy(update={"generation": 2, "at": at(2.5)})
    status = status.model_copy(update={"generation": newest, "transitions": (first, second)})
    forming = [[part.name for part in parts_of(each, status, None)] for each in (first, second)]
    assert ["forming the next generation" in parts for parts in forming] == [False, True]


@given(times=st.lists(st.floats(-100, 100), min_size=4, max_size=4), noticed=st.floats(-100, 100) | st.none())
def test_clocks_that_differ_never_run_a_trace_backwards(times: list[float], noticed: float | None) -> None:
    status = trained_on()
    [transition] = status.transitions
    assert status.generation is not None
    assert status.commit is not None
    transition = transition.model_copy(update={"at": at(times[0])})
    status = status.model_copy(
        update={
            "generation": status.generation.model_copy(update={"started_at": at(times[1])}),
            "commit": status.commit.model_copy(update={"committed_at": at(times[2])}),
        }
    )
    request = Request(
        generation=transition.generation,
        requested_at=at(times[3]),
        noticed_at=at(noticed) if noticed is not None else None,
    )
    parts = list(parts_of(transition, status, request))
    assert all(part.start <= part.end for part in parts)
    assert all(one.end == other.start for one, other in pairwise(parts))
    assert parts[-1].end == at(4.0)


@dataclass
class Collector:
    """Receives traces over OTLP/HTTP, and keeps each request with its path."""

    url: str
    received: list[tuple[str, ExportTraceServiceRequest]]


@pytest.fixture
def collector() -> Iterator[Collector]:
    received: list[tuple[str, ExportTraceServiceRequest]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield Collector(f"http://127.0.0.1:{server.server_port}", received)
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("variable", "path", "asked"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "", "/v1/traces"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "/team/traces", "/team/traces"),
    ],
)
def test_a_collector_gets_the_trace_over_otlp(
    variable: str, path: str, asked: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, f"{collector.url}{path}")
    processor = processor_from_environment()
    assert processor is not None
    tracer = ChangeTracer(processor)
    requests: dict[int, Request] = {}
    tracer.passed(KEY, requests, seen(draining(), training_job().says(4, notices=(notice(4),))), draining())
    tracer.passed(KEY, requests, seen(draining()), trained_on())
    processor.shutdown()
    [(posted_to, request)] = collector.received
    assert posted_to == asked
    [resource] = request.resource_spans
    service = {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"]
    assert service == "spottrain-operator"
    *parts, root = resource.scope_spans[0].spans
    assert (root.name, root.parent_span_id) == ("change of members: Preempted", b"")
    assert {each.key: each.value.string_value for each in root.attributes}["spottrain.job"] == "gpt"
    assert {(part.trace_id, part.parent_span_id) for part in parts} == {(root.trace_id, root.span_id)}
    assert [part.name for part in parts] == [
        "notice to last step",
        "commit",
        "end of the generation",
        "forming the next generation",
        "start and resume",
    ]
    times = [root.start_time_unix_nano, *(part.end_time_unix_nano for part in parts)]
    assert [part.start_time_unix_nano for part in parts] == times[:-1]
    assert times[-1] == root.end_time_unix_nano


def test_without_an_endpoint_traces_go_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert processor_from_environment() is None


@pytest.mark.parametrize("seconds", [None, 3.0])
def test_without_a_collector_nothing_is_kept(seconds: float | None) -> None:
    tracer = ChangeTracer(None)
    requests: dict[int, Request] = {}
    tracer.passed(KEY, requests, seen(draining()), draining())
    tracer.passed(KEY, requests, seen(draining()), trained_on(seconds))
    assert not requests
