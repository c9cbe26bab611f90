"""A control API for tests, over real HTTP, whose reviews of tokens can wait and fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from pod_tokens import pod_token
from spottrain_api.contract.assignments import Assignment, AssignmentAction, GenerationAssignment, Relay, RelayReport
from spottrain_api.contract.names import TOKEN_AUDIENCE
from spottrain_api.settings.entrypoint import Entrypoint
from spottrain_operator.control_api.agents import AssignmentBoard, ReportBox
from spottrain_operator.control_api.cluster_keys import ClusterKeys
from spottrain_operator.control_api.server import ControlApi
from spottrain_operator.core.timing import DEFAULT_TIMING
from spottrain_operator.kube.identities import JobKey, PodIdentity
from spottrain_operator.kube.resources import TOKEN_REVIEWS
from world.cluster import MemoryCluster
from world.faults import Fault

NOW = datetime(2026, 1, 1, tzinfo=UTC)
JOB = JobKey(namespace="team", name="gpt")
POD = PodIdentity(namespace="team", pod="gpt-1", uid="uid-1")
TOKEN = pod_token(POD)
RENEWED_TOKEN = pod_token(POD, name="renewed")
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
AUTHORIZED_ANEW = {"Authorization": f"Bearer {RENEWED_TOKEN}"}
WAIT = Assignment(action=AssignmentAction.WAIT)
EXIT = Assignment(action=AssignmentAction.EXIT)


@dataclass
class Setup:
    client: TestClient[web.Request, web.Application]
    board: AssignmentBoard
    reports: ReportBox
    cluster: MemoryCluster
    reviews: Fault
    tokens: dict[str, str]
    """By pod uid."""
    woken: list[tuple[JobKey, bool]] = field(default_factory=list)
    ready: bool = True
    clock: float = 0.0


@asynccontextmanager
async def served(
    *peers: PodIdentity, record_interval: float = DEFAULT_TIMING.record_interval
) -> AsyncIterator[Setup]:
    """Serve a control API that knows the pod POD of a job, and these."""
    cluster = MemoryCluster()
    cluster.tokens[TOKEN, TOKEN_AUDIENCE] = cluster.tokens[RENEWED_TOKEN, TOKEN_AUDIENCE] = POD
    tokens = {POD.uid: TOKEN} | {peer.uid: pod_token(peer) for peer in peers}
    cluster.tokens |= {(tokens[peer.uid], TOKEN_AUDIENCE): peer for peer in peers}
    reviews = Fault(resource=TOKEN_REVIEWS)
    cluster.before.append(reviews)
    board = AssignmentBoard()
    woken: list[tuple[JobKey, bool]] = []
    result: Setup
    reports = ReportBox(
        lambda job, urgent: woken.append((job, urgent)), now=lambda: NOW + timedelta(seconds=result.clock)
    )
    reports.keep(JOB, frozenset({POD.uid, *(peer.uid for peer in peers)}))
    api = ControlApi(
        cluster=cluster,
        keys=ClusterKeys(cluster.get_raw),
        board=board,
        reports=reports,
        is_ready=lambda: result.ready,
        now=lambda: NOW + timedelta(seconds=result.clock),
        record_interval=record_interval,
        long_poll_seconds=0.2,
    )
    async with TestClient(TestServer(api.application())) as client:
        result = Setup(client, board, reports, cluster, reviews, tokens, woken)
        yield result


def running(number: int, node_rank: int, relay: Relay | None = None, **changes: Any) -> Assignment:
    """RUN for a member of a generation with three."""
    generation = GenerationAssignment(
        number=number,
        rendezvous_id=f"g{number}",
        rendezvous_endpoint="127.0.0.1:1",
        node_rank=node_rank,
        num_nodes=3,
        entrypoint=Entrypoint(script="train.py"),
        trainer={},
    )
    return Assignment(action=AssignmentAction.RUN, generation=generation, relay=relay, **changes)


def report(**changes: object) -> RelayReport:
    values = {"pod": POD.pod, "pod_uid": POD.uid, "rendezvous_port": 1234, "sent_at": NOW} | changes
    return RelayReport.model_validate(values)


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.005)
