"""Whether a job fits the memory of its nodes, and what would make it fit.

The module finds the smallest such change. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spottrain_api.settings.choices import Precision, Sharding, Strategy
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_planner import deepspeed_json
from spottrain_planner.memory_estimate import DDP, DEEPSPEED, FSDP, Estimate, ModelFacts, Workload
from spottrain_planner.refusals import refusals
from spottrain_planner.strategy_choice import Choice, Memory, choose_strategy

# Largest number of nodes that is tried, unless the job has more.
MOST_NODES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Memory of one accelerator and of one node, in bytes.

    Attributes:
        node_bytes: None: it is enough.
    """

    accelerator_bytes: int
    node_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A job, its model and its hardware.

    Attributes:
        sequence_length: Tokens in a sample. None: it is unknown.
    """

    spec: TrainingJobSpec
    model: ModelFacts
    hardware: Hardware
    sequence_length: int | None = None

    def workload(self, num_nodes: int | None = None) -> Workload:
        """Return the workload on this number of nodes.

        Default: nodes.min, where the strategy has to fit.
        """
        spec = self.spec
        deepspeed = deepspeed_json.user_json(spec.deepspeed.config)
        return Workload(
            model=self.model,
            micro_batch=spec.batch.micro,
            world_size=(num_nodes or spec.nodes.min) * spec.processes_per_node,
            precision=spec.precision.value,
            sequence_length=self.sequence_length,
            activation_checkpointing=spec.activation_checkpointing,
            fsdp_ranks=spec.processes_per_node if spec.fsdp.sharding is Sharding.HYBRID else None,
            fsdp_keeps_gathered=not spec.fsdp.reshard_after_forward,
            global_batch=spec.batch.global_,
            multiple_of=spec.batch.multiple_of,
            zero_bucket=deepspeed_json.named_size(deepspeed, deepspeed_json.BUCKET),
            zero_live=deepspeed_json.named_size(deepspeed, deepspeed_json.LIVE),
        )

    def memory(self) -> Memory:
        """Return the memory of one rank."""
        node = self.hardware.node_bytes
        return Memory(
            accelerator_bytes=self.hardware.accelerator_bytes,
            host_bytes=None if node is None else node // self.spec.processes_per_node,
        )

    def choice(self) -> Choice:
        """Return what `strategy: auto` chooses."""
        deepspeed = self.spec.deepspeed
        wanted = deepspeed_json.named_stage(deepspeed, deepspeed_json.user_json(deepspeed.config))
        return choose_strategy(
            self.workload(), self.memory(), allowed=lambda e: wanted is None or e.zero_stage in (None, wanted)
        )

    def named(self) -> Choice:
        """Return the strategy that the job names, or what auto chooses."""
        if self.spec.strategy is Strategy.AUTO:
            return self.choice()
        return choose_strategy(self.workload(), self.memory(), allowed=self._is_named)

    def _is_named(self, estimate: Estimate) -> bool:
        spec = self.spec
        if spec.strategy is Strategy.FSDP:
            return (estimate.strategy, estimate.offload_parameters) == (FSDP, spec.fsdp.offload)
        if spec.strategy is Strategy.DDP:
            return estimate.strategy == DDP
        zero = deepspeed_json.zero_optimization(spec.deepspeed, deepspeed_json.user_json(spec.deepspeed.config))
        stage: int = zero["stage"]
        if stage == 0:
            return estimate.strategy == DDP
        # Estimates offload parameters together with the optimizer, and the optimizer at stages 2 and 3.
        parameters = deepspeed_json.offloads(zero, deepspeed_json.OFFLOAD_PARAMETERS)
        optimizer = deepspeed_json.offloads(zero, deepspeed_json.OFFLOAD_OPTIMIZER) or parameters
        wanted = (DEEPSPEED, max(stage, 2) if optimizer else stage, optimizer, parameters)
        return wanted == (
            estimate.strategy,
            estimate.zero_stage,
            estimate.offload_optimizer,
            estimate.offload_parameters,
        )

    def with_micro(self, size: int) -> PlannedJob:
        return self._with(batch=self.spec.batch.model_copy(update={"micro": size}))

    def with_checkpointing(self) -> PlannedJob:
        return self._with(activation_checkpointing=True)

    def with_nodes(self, least: int) -> PlannedJob:
        most = max(self.spec.nodes.max, least)
        return self._with(nodes=self.spec.nodes.model_copy(update={"min": least, "max": most}))

    def with_processes(self, number: int) -> PlannedJob:
        return self._with(processes_per_node=number)

    def in_bf16(self) -> PlannedJob:
        return self._with(precision=Precision.BF16)

    def _with(self, **fields: object) -> PlannedJob:
        return PlannedJob(
            spec=self.spec.model_copy(update=fields),
            model=self.model,
            hardware=self.hardware,
            sequence_length=self.sequence_length,
        )


def smallest_change(training: PlannedJob) -> PlannedJob | None:
    """Return the first change that makes the job fit, or None.

    Changes that alter the run least come first. Those that the API server refuses are left out.
    """
    allowed = (changed for changed in _changes(training) if not refusals(changed.spec))
    return next((changed for changed in allowed if changed.named().fits), None)


def differences(before: TrainingJobSpec, after: TrainingJobSpec) -> list[str]:
    """List the changed fields as they are written in the job's YAML."""
    values = {
        "batch.micro": (before.batch.micro, after.batch.micro),
        "activationCheckpointing": (before.activation_checkpointing, after.activation_checkpointing),
        "nodes.min": (before.nodes.min, after.nodes.min),
        "nodes.max": (before.nodes.max, after.nodes.max),
        "processesPerNode": (before.processes_per_node, after.processes_per_node),
        "precision": (before.precision.value, after.precision.value),
    }
    return [
        f"{field}: {str(new).lower()} instead of {str(old).lower()}"
        for field, (old, new) in values.items()
        if old != new
    ]


def _changes(training: PlannedJob) -> Iterator[PlannedJob]:
    """Yield changes of the job, those that keep the result first.

    A change of precision, which does not keep it, comes after them.
    """
    yield from _same_result(training)
    if training.spec.precision is Precision.FP32:
        bf16 = training.in_bf16()
        yield bf16
        yield from _same_result(bf16)


def _same_result(training: PlannedJob) -> Iterator[PlannedJob]:
    recomputed = training.with_checkpointing()
    yield from _smaller_steps(training)
    for changed in (training, recomputed, recomputed.with_micro(1)):
        yield from _more_nodes(changed)
    for changed in _fewer_processes(training):
        yield changed
        yield from _smaller_steps(changed)


def _smaller_steps(training: PlannedJob) -> Iterator[PlannedJob]:
    recomputed = training.with_checkpointing()
    yield from _smaller_batches(training)
    yield recomputed
    yield from _smaller_batches(recomputed)


def _smaller_batches(training: PlannedJob) -> Iterator[PlannedJob]:
    """Halve the micro-batch, so that the global batch stays a multiple of it."""
    size = training.spec.batch.micro // 2
    while size:
        yield training.with_micro(size)
        size //= 2


def _more_nodes(training: PlannedJob) -> Iterator[PlannedJob]:
    nodes = training.spec.nodes
    return (training.with_nodes(number) for number in range(nodes.min + 1, max(MOST_NODES, nodes.max) + 1))


def _fewer_processes(training: PlannedJob) -> Iterator[PlannedJob]:
    """Leave each rank a larger share of the node's memory."""
    return (training.with_processes(number) for number in range(training.spec.processes_per_node - 1, 0, -1))
