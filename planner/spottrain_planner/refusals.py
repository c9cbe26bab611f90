"""What the API server refuses about the fields that a plan reads."""

from __future__ import annotations

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.settings.choices import Precision, Sharding, Strategy
from spottrain_api.settings.training import DeepSpeedConfig, FsdpConfig
from spottrain_api.v1alpha1.capacity import MAX_MEMBERS
from spottrain_api.v1alpha1.spec import TrainingJobSpec


def refusals(spec: TrainingJobSpec) -> list[str]:
    """Return the messages of the CRD's rules that a job breaks.

    The rules themselves are in CEL (`cel_rules` of the models). These are the ones between fields that a plan reads.
    """
    nodes, batch, deepspeed = spec.nodes, spec.batch, spec.deepspeed
    on_demand, spot = spec.capacity.on_demand, spec.capacity.spot
    types = {pool.kind for pool in spec.capacity.pools}
    largest_world = nodes.max * spec.processes_per_node
    idle = {
        Strategy.FSDP: spec.fsdp != FsdpConfig(),
        Strategy.DEEPSPEED: deepspeed != DeepSpeedConfig(),
    }
    rules = {
        "nodes.min is larger than nodes.max; lower min or raise max": nodes.min > nodes.max,
        f"nodes.max is above {MAX_MEMBERS}, the most that one job can have; lower it": nodes.max > MAX_MEMBERS,
        "capacity.onDemand.min is larger than capacity.onDemand.max; lower min or raise max": (
            on_demand.max is not None and on_demand.floor(MAX_MEMBERS) > on_demand.max
        ),
        "capacity.onDemand.min is larger than nodes.max; lower the on-demand floor or raise nodes.max": (
            isinstance(on_demand.min, int) and on_demand.min > nodes.max
        ),
        "capacity.onDemand.max and capacity.spot.max together are less than nodes.min; raise one of them": (
            on_demand.max is not None and spot.max is not None and on_demand.max + spot.max < nodes.min
        ),
        **{
            f"capacity.pools has only {kind.value} pools, and capacity.{field}.max is less than nodes.min; raise it, "
            "lower nodes.min, or add a pool of the other type": (
                types == {kind} and limit is not None and limit < nodes.min
            )
            for kind, field, limit in (
                (CapacityType.ON_DEMAND, "onDemand", on_demand.max),
                (CapacityType.SPOT, "spot", spot.max),
            )
        },
        "batch.micro is larger than batch.global; lower micro or raise global": batch.micro > batch.global_,
        "batch.global is not a multiple of batch.multipleOf; change one of them": batch.global_ % batch.multiple_of,
        "batch.micro is smaller than batch.multipleOf; raise micro or lower multipleOf": (
            batch.micro < batch.multiple_of
        ),
        "batch.global is below the largest world size (nodes.max times processesPerNode) times batch.multipleOf, "
        "which leaves a rank without a sample; raise batch.global or lower nodes.max": (
            batch.global_ < largest_world * batch.multiple_of
        ),
        "precision fp16 needs the strategy deepspeed, which scales the loss; set that strategy, or use bf16": (
            spec.precision is Precision.FP16 and spec.strategy is not Strategy.DEEPSPEED
        ),
        **{
            f"{strategy.value} holds settings that have no effect with this strategy; remove them, or set strategy "
            f"{strategy.value} or auto": is_set and spec.strategy not in (Strategy.AUTO, strategy)
            for strategy, is_set in idle.items()
        },
        "fsdp.sharding hybrid shards over the ranks of a node, but processesPerNode is 1; raise it, or use full": (
            spec.fsdp.sharding is Sharding.HYBRID and spec.processes_per_node == 1
        ),
        "deepspeed.offloadOptimizer needs zeroStage 1, 2 or 3; raise it, or don't offload": (
            deepspeed.offload_optimizer and deepspeed.zero_stage == 0
        ),
        "deepspeed.offloadParameters needs zeroStage 3; set it, or don't offload": (
            deepspeed.offload_parameters and deepspeed.zero_stage != 3
        ),
    }
    return [message for message, is_broken in rules.items() if is_broken]
