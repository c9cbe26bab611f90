"""A job as the command line reads it, with a history."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

from spottrain_api.contract.assignments import CapacityType, Member
from spottrain_api.contract.reports import CommitRef, MemoryEstimate, StrategyChoice
from spottrain_api.history import HistoryPoint
from spottrain_api.v1alpha1.spending import CostStatus
from spottrain_api.v1alpha1.status import (
    Condition,
    Counts,
    GenerationState,
    GenerationStatus,
    Phase,
    ProgressStatus,
    TrainingJobStatus,
    Transition,
)
from spottrain_cli.job_view import EventSummary, JobSnapshot, PodSummary

START = datetime(2026, 1, 1, tzinfo=UTC)
SPEC = {"batch": {"global": 8}}


def at(offset: float) -> datetime:
    return START + timedelta(seconds=offset)


def history_point(offset: float, step: int, phase: Phase, generation: int = 1, spot: int = 4) -> HistoryPoint:
    return HistoryPoint(
        at=at(offset).timestamp(),
        step=step,
        loss=5.0 / (step + 1) if step else math.nan,
        tokens_per_second=1000.0,
        generation=generation,
        on_demand=2,
        spot=spot,
        committed_step=0,
        phase=phase.value,
    )


def snapshot() -> JobSnapshot:
    member = Member(
        pod="gpt-1", pod_uid="u", address="127.1.0.2", node="spot-1", node_rank=0, capacity_type=CapacityType.SPOT
    )
    status = TrainingJobStatus(
        phase=Phase.RUNNING,
        message="1 member trains <b>well</b>.",
        generation=GenerationStatus(
            number=3,
            state=GenerationState.ACTIVE,
            rendezvous_id="r",
            rendezvous_endpoint="127.1.0.2:1",
            world_size=1,
            members=(member,),
            started_at=START,
        ),
        progress=ProgressStatus(
            step=30, total_steps=100, display="30/100", loss=1.25, tokens_per_second=1000, data_wait_ratio=0.48
        ),
        commit=CommitRef(generation=2, step=25, manifest="m", committed_at=START),
        transitions=(
            Transition(
                generation=2,
                reason="Preempted",
                message="node spot-2 goes",
                at=at(10),
                last_step=25,
                steps_redone=0,
                seconds_without_step=4.25,
                world_size_before=2,
                world_size_after=1,
            ),
        ),
        strategy=StrategyChoice(
            strategy="fsdp",
            name="fsdp",
            reason="ddp would need 40.0 GiB.",
            memory=MemoryEstimate(
                total=7 << 30, available=8 << 30, parameters=1, gradients=1, optimizer=2, activations=3, working=0
            ),
        ),
        conditions=(
            Condition(
                type="CheckpointsHealthy",
                status="False",
                reason="CheckpointStorageFull",
                message="The disk is full.",
                last_transition_time=START,
            ),
        ),
        members=Counts(world_size=1, spot=1),
        preemptions=1,
        goodput_display="92%",
        cost=CostStatus(total=0.5, on_demand_only=2.0, currency="EUR", display="0.50 EUR of 2.00"),
    )
    return JobSnapshot(
        namespace="default",
        name="gpt",
        spec=SPEC,
        created_at=START,
        status=status,
        pods=(
            PodSummary(name="gpt-1", node="spot-1", capacity_type="spot", state="Running"),
            PodSummary(name="gpt-2", node="", capacity_type="on-demand", state="Pending"),
            PodSummary(name="gpt-3", node="od-1", capacity_type="on-demand", state="Running"),
        ),
        events=(EventSummary(at=at(10), type="Warning", reason="Preempted", message="node spot-2 goes in 30 s"),),
        history=(
            history_point(5, 0, Phase.STARTING),
            history_point(8, 1, Phase.RUNNING),
            history_point(10, 25, Phase.DRAINING),
            history_point(12, 25, Phase.STARTING, generation=3, spot=0),
            history_point(14, 30, Phase.RUNNING, generation=3, spot=1),
        ),
    )
