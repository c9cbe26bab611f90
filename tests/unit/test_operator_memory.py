"""What the operator keeps of a member at rest."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

from scene import training_job
from spottrain_api.contract.assignments import AgentPhase, AgentReport, CapacityType, Member
from spottrain_api.contract.reports import CommitRef, Progress, TrainerPhase
from spottrain_api.v1alpha1.status import GenerationState, GenerationStatus, TrainingJobStatus
from spottrain_operator.control_api.agents import AssignmentBoard, ReportBox
from spottrain_operator.control_api.report_bounds import parse_report
from spottrain_operator.core.assignments import assignments_for
from spottrain_operator.core.model import JobView
from spottrain_operator.kube.identities import JobKey, PodIdentity

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NUM_MEMBERS = 64
KEY = JobKey(namespace="team", name="gpt")
# With sets of fields of their own, and settings of ranks of their own, they would take 10 KiB.
MOST_BYTES = 5.5 * 1024


def job_with_members() -> JobView:
    members = tuple(
        Member(
            pod=f"gpt-{rank}",
            pod_uid=f"{rank:036d}",
            address=f"10.0.0.{rank}",
            node=f"node-{rank}",
            node_rank=rank,
            capacity_type=CapacityType.SPOT,
        )
        for rank in range(NUM_MEMBERS)
    )
    generation = GenerationStatus(
        number=1,
        state=GenerationState.ACTIVE,
        rendezvous_id="gpt-g1",
        rendezvous_endpoint="10.0.0.0:29500",
        world_size=NUM_MEMBERS,
        members=members,
        started_at=NOW,
    )
    return replace(training_job().observed.job, status=TrainingJobStatus(generation=generation))


def report(member: Member) -> bytes:
    commit = CommitRef(generation=1, step=900, manifest="attempts/g1/manifest-900.json", committed_at=NOW)
    progress = Progress(
        generation=1,
        phase=TrainerPhase.TRAINING,
        step=1000,
        total_steps=10_000,
        loss=2.5,
        tokens_per_second=123456.7,
        step_seconds=0.5,
        data_wait_seconds=0.01,
        memory_bytes=70 * 2**30,
        first_step_at=NOW,
        last_step_at=NOW,
        updated_at=NOW,
        commit=commit,
        checkpoint_interval="every 10 min",
    )
    said = AgentReport(
        pod=member.pod,
        pod_uid=member.pod_uid,
        generation=1,
        phase=AgentPhase.RUNNING,
        warm=True,
        rendezvous_port=29500,
        progress=progress,
        step_age_seconds=0.2,
        commit=commit,
        process="ab12",
        number=7,
        sent_at=NOW,
    )
    return said.to_json().encode()


def kept_of(job: JobView, bodies: Mapping[PodIdentity, bytes]) -> tuple[ReportBox, AssignmentBoard]:
    board, reports = AssignmentBoard(), ReportBox(lambda _job, urgent: None)
    reports.keep(KEY, frozenset(pod.uid for pod in bodies))
    for pod, body in bodies.items():
        reports.put(pod, parse_report(body))
    board.publish(KEY, assignments_for(job, [pod.uid for pod in bodies]))
    return reports, board


async def test_an_assignment_that_is_published_again_is_kept_once() -> None:
    """Each pass publishes all of them anew, and a poll that waits holds those before."""
    job = job_with_members()
    generation = job.status.generation
    assert generation is not None
    uids = [member.pod_uid for member in generation.members]
    board = AssignmentBoard()
    board.publish(KEY, assignments_for(job, uids))
    first = await board.next(uids[1], after=None, timeout_seconds=0)
    board.publish(KEY, assignments_for(job, uids))
    assert first is not None
    assert await board.next(uids[1], after=None, timeout_seconds=0) is first


def test_report_and_assignment_of_a_member_take_little_memory() -> None:
    job = job_with_members()
    assert job.status.generation is not None
    members = job.status.generation.members
    bodies = {PodIdentity(namespace="team", pod=each.pod, uid=each.pod_uid): report(each) for each in members}
    kept_of(job, bodies)  # what is made once for all
    gc.collect()
    tracemalloc.start()
    try:
        kept = kept_of(job, bodies)
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken / NUM_MEMBERS < MOST_BYTES
    assert len(kept[0].of(frozenset(pod.uid for pod in bodies))) == NUM_MEMBERS
