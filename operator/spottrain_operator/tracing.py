"""A trace for each change of members.

It covers the time from the cloud's notice to the first step of the next generation.

The operator knows all times once that step is made, and writes the whole trace then. So nothing has to carry the
trace's context from the watcher over agents to ranks. A trace that was open when an operator ended starts at the last
step.

OpenTelemetry takes 3 MiB, and few installations have a collector. So it is imported only for one.

https://opentelemetry.io/docs/specs/otel/trace/api/
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from spottrain_api.v1alpha1.status import TrainingJobStatus, Transition
from spottrain_operator.core.facts.notices import notice_of_end
from spottrain_operator.core.model import Observed
from spottrain_operator.core.policies.transitions import completed
from spottrain_operator.kube.identities import JobKey

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stretch of a change of members."""

    name: str
    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Why and when the end of a generation was asked for.

    Attributes:
        source: Who announced it; empty without a notice.
    """

    generation: int
    requested_at: datetime
    noticed_at: datetime | None = None
    source: str = ""


def processor_from_environment() -> SpanProcessor | None:
    """Where traces go: to the collector of OpenTelemetry's own variables.

    None: nowhere. The exporter reads the variables itself, from the environment of the process.
    """
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter())


class ChangeTracer:
    """Writes the traces of all jobs. What is left is sent when the process exits."""

    def __init__(self, processor: SpanProcessor | None) -> None:
        self._provider: TracerProvider | None = None
        if processor is not None:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider

            self._provider = TracerProvider(resource=Resource.create({"service.name": "spottrain-operator"}))
            self._provider.add_span_processor(processor)

    def passed(self, key: JobKey, requests: dict[int, Request], observed: Observed, after: TrainingJobStatus) -> None:
        """Write the traces that a pass completed.

        Args:
            key: The job.
            requests: The requests of the job that are yet to be traced, by generation. It is updated.
            observed: What the pass observed.
            after: The status on which it decided.
        """
        if self._provider is None:
            return
        request = request_of(after, observed)
        if request is not None:
            requests.setdefault(request.generation, request)
        for transition in completed(observed.job.status, after):
            self._write(key, transition, after, requests.get(transition.generation))
            for number in [each for each in requests if each <= transition.generation]:
                del requests[number]

    def _write(self, key: JobKey, transition: Transition, status: TrainingJobStatus, request: Request | None) -> None:
        if self._provider is None:
            return
        from opentelemetry.trace import set_span_in_context

        tracer = self._provider.get_tracer("spottrain")
        parts = list(parts_of(transition, status, request))
        attributes: dict[str, str | int] = {
            "spottrain.namespace": key.namespace,
            "spottrain.job": key.name,
            "spottrain.generation": transition.generation,
            "spottrain.reason": transition.reason,
            "spottrain.message": transition.message,
            "spottrain.last_step": transition.last_step,
            "spottrain.steps_redone": transition.steps_redone or 0,
            "spottrain.world_size_before": transition.world_size_before,
            "spottrain.world_size_after": transition.world_size_after or 0,
            "spottrain.source": request.source if request is not None else "",
        }
        root = tracer.start_span(
            f"change of members: {transition.reason}", start_time=_nanoseconds(parts[0].start), attributes=attributes
        )
        for part in parts:
            span = tracer.start_span(
                part.name, context=set_span_in_context(root), start_time=_nanoseconds(part.start)
            )
            span.end(_nanoseconds(part.end))
        root.end(_nanoseconds(parts[-1].end))


def request_of(status: TrainingJobStatus, observed: Observed) -> Request | None:
    """The request for the newest generation's end, or None without one.

    It has the oldest notice for which the generation ends.
    """
    generation = status.generation
    if generation is None or generation.requested_at is None:
        return None
    notice = notice_of_end(generation, observed)
    return Request(
        generation=generation.number,
        requested_at=generation.requested_at,
        noticed_at=notice.observed_at if notice is not None else None,
        source=notice.source if notice is not None else "",
    )


def parts_of(transition: Transition, status: TrainingJobStatus, request: Request | None) -> Iterator[Part]:
    """The parts of a change, one after the other, without gaps.

    Times of different clocks never run backwards.
    """
    last_step = transition.last_step_at or transition.at
    first_step = last_step + timedelta(seconds=transition.seconds_without_step or 0.0)
    marks: list[tuple[str, datetime]] = []
    at = last_step
    if request is not None:
        at = min(last_step, request.noticed_at or request.requested_at)
        marks.append(("notice to last step", last_step))
    commit, generation = status.commit, status.generation
    if commit is not None and commit.step == transition.last_step:
        marks.append(("commit", commit.committed_at))
    marks.append(("end of the generation", transition.at))
    # Only the newest change led to the newest generation. Numbers may skip some after an earlier job at the folder.
    newest = max(each.generation for each in status.transitions)
    if generation is not None and transition.generation == newest < generation.number:
        marks.append(("forming the next generation", generation.started_at))
    marks.append(("start and resume", first_step))
    for name, until in marks:
        end = min(max(at, until), max(at, first_step))
        yield Part(name=name, start=at, end=end)
        at = end


def _nanoseconds(at: datetime) -> int:
    return int(at.timestamp() * 1e9)
