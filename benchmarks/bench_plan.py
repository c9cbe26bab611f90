"""Time that `plan` takes for 1,000 jobs of 8 members.

Run: python -m benchmarks.bench_plan

The jobs train: each has a running generation, a report of each agent, and progress to record, so that no policy is
skipped. Observing and writing aren't measured, because they depend on the API server.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from spottrain_api.contract.assignments import AgentPhase, AgentReport, CapacityType
from spottrain_api.contract.reports import Progress, TrainerPhase
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.core.model import JobView, NodeView, Observed, PodView, ReportView
from spottrain_operator.core.plan import plan

NUM_JOBS = 1000
NUM_MEMBERS = 8
START = datetime(2026, 1, 1, tzinfo=UTC)


def training_job(number: int) -> Observed:
    """A job whose eight pods are up. Its first generation starts with the first plan."""
    spec = TrainingJobSpec.model_validate(
        {
            "image": "train:1",
            "entrypoint": {"script": "train.py"},
            "nodes": {"min": 2, "max": NUM_MEMBERS},
            "capacity": {"onDemand": {"min": 2, "pricePerHour": 3.0}, "spot": {"pricePerHour": 1.0}},
            "batch": {"global": 64},
            "checkpoint": {"uri": f"s3://bucket/{number}"},
        }
    )
    job = JobView(
        namespace="default",
        name=f"job{number}",
        uid=f"{number:08d}",
        spec=spec,
        metadata_generation=1,
        created_at=START,
    )
    pods = tuple(pod(number, sequence) for sequence in range(1, NUM_MEMBERS + 1))
    nodes = {p.node: NodeView(name=p.node) for p in pods if p.node is not None}
    return Observed(job=job, pods=pods, nodes=nodes, reports={}, template_hash="t1", listening_since=START)


def pod(number: int, sequence: int) -> PodView:
    return PodView(
        name=f"job{number}-{sequence}",
        uid=f"{number}-{sequence}",
        sequence=sequence,
        capacity_type=CapacityType.ON_DEMAND if sequence <= 2 else CapacityType.SPOT,
        template_hash="t1",
        created_at=START,
        phase="Running",
        ready=True,
        ready_since=START,
        node=f"node-{number}-{sequence}",
        ip="10.0.0.1",
        container_started=True,
    )


def reports(observed: Observed, now: datetime, generation: int, step: int) -> dict[str, ReportView]:
    """What all agents report at `now`."""
    progress = Progress(
        generation=generation,
        phase=TrainerPhase.TRAINING,
        step=step,
        total_steps=10_000,
        step_seconds=0.5,
        first_step_at=START + timedelta(seconds=5),
        last_step_at=now,
        updated_at=now,
    )
    return {
        p.uid: ReportView(
            report=AgentReport(
                pod=p.name,
                pod_uid=p.uid,
                generation=generation,
                phase=AgentPhase.RUNNING if generation else AgentPhase.IDLE,
                warm=True,
                rendezvous_port=29500,
                progress=progress if generation else None,
                step_age_seconds=0.2,
                sent_at=now,
            ),
            received_at=now,
        )
        for p in observed.pods
    }


def with_status(observed: Observed, now: datetime) -> Observed:
    """`observed` after one pass of the operator."""
    return replace(observed, job=replace(observed.job, status=plan(observed, now).status))


def main() -> None:
    jobs = [training_job(number) for number in range(NUM_JOBS)]
    now = START + timedelta(seconds=1)
    jobs = [with_status(replace(job, reports=reports(job, now, 0, 0)), now) for job in jobs]
    now = START + timedelta(seconds=60)
    jobs = [replace(job, reports=reports(job, now, 1, 100)) for job in jobs]
    begin = time.perf_counter()
    plans = [plan(job, now) for job in jobs]
    elapsed = time.perf_counter() - begin
    running = sum(p.status.progress.step == 100 for p in plans)
    print(f"{NUM_JOBS} jobs of {NUM_MEMBERS} members, {running} running: planned in {elapsed:.3f} s")


if __name__ == "__main__":
    main()
