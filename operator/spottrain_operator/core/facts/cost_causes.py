"""What each node that the job holds costs money for."""

from __future__ import annotations

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.spending import CostCause
from spottrain_api.v1alpha1.status import GenerationStatus, Phase, TrainingJobStatus
from spottrain_operator.core.facts.demand import demand
from spottrain_operator.core.facts.situation import Situation

_OVER = frozenset({Phase.SUSPENDED, Phase.SUCCEEDED, Phase.FAILED})


def cause_of(situation: Situation, uid: str) -> CostCause:
    """What the node of a pod did since the last record.

    What the status says was true up to now: each change of it is a record.
    """
    status = situation.observed.job.status
    running = status.running
    if running is None:
        return _between_generations(situation, status)
    if all(member.pod_uid != uid for member in running.members):
        return CostCause.IDLE
    if status.phase is not Phase.RUNNING:
        return CostCause.START
    return CostCause.REDONE if _makes_steps_again(status, running) else CostCause.TRAINING


def stand_ins(situation: Situation) -> frozenset[str]:
    """Uids of the pods on on-demand nodes beyond the floor."""
    on_demand = sorted(
        (each.pod for each in situation.held if each.pod.capacity_type is CapacityType.ON_DEMAND),
        key=lambda pod: pod.sequence,
    )
    return frozenset(pod.uid for pod in on_demand[demand(situation.spec).on_demand :])


def _between_generations(situation: Situation, status: TrainingJobStatus) -> CostCause:
    if status.phase in _OVER:
        return CostCause.IDLE
    num_nodes = len(situation.held) + len(situation.given_back)
    return CostCause.START if num_nodes >= situation.spec.nodes.min else CostCause.CAPACITY


def _makes_steps_again(status: TrainingJobStatus, running: GenerationStatus) -> bool:
    """Whether an earlier generation has made the newest step, too."""
    progress, first = status.progress, running.first_step_at
    step = running.resume.step if running.resume is not None else 0
    if first is not None and progress.last_step_at is not None and progress.last_step_at >= first:
        step = progress.step
    return step < max((each.last_step for each in status.transitions), default=0)
