"""`strategy: auto`: the first strategy that fits into the memory of every rank."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from spottrain import exchange
from spottrain.engines.blocks import find_blocks
from spottrain.engines.deepspeed_config import user_settings
from spottrain.engines.deepspeed_limits import unfit_for_zero
from spottrain.engines.engine import EngineConfig
from spottrain.engines.model_state import num_bytes, unfit_for_shards
from spottrain.engines.precision import NAMES
from spottrain_api.contract.reports import MemoryEstimate, StrategyChoice
from spottrain_api.settings.choices import Sharding
from spottrain_planner.deepspeed_json import BUCKET, LIVE, named_size, named_stage
from spottrain_planner.memory_estimate import DEEPSPEED, FSDP, Estimate, ModelFacts, Workload
from spottrain_planner.strategy_choice import Memory, choose_strategy, host_needed
from spottrain_runtime import host_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Memory of a rank, and whether DeepSpeed is installed.

    Attributes:
        accelerator_bytes: Memory of its accelerator. None on the CPU.
        host_bytes: Its share of the host's memory.
        has_deepspeed: Whether DeepSpeed is installed.
    """

    accelerator_bytes: int | None
    host_bytes: int
    has_deepspeed: bool

    @classmethod
    def of(cls, device: torch.device, local_world_size: int) -> Machine:
        on_cuda = device.type == "cuda"
        return cls(
            accelerator_bytes=torch.cuda.get_device_properties(device).total_memory if on_cuda else None,
            host_bytes=host_memory.total_bytes() // local_world_size,
            has_deepspeed=importlib.util.find_spec("deepspeed") is not None,
        )


def least_of_all(own: Machine, group: dist.ProcessGroup | None) -> Machine:
    """The least that any rank has. A collective of `group`; None: a world of one."""
    machines = [own]
    if group is not None:
        machines = [Machine(**each) for each in exchange.all_gather(asdict(own), group)]
    accelerators = [machine.accelerator_bytes for machine in machines if machine.accelerator_bytes is not None]
    return Machine(
        accelerator_bytes=min(accelerators) if accelerators else None,
        host_bytes=min(machine.host_bytes for machine in machines),
        has_deepspeed=all(machine.has_deepspeed for machine in machines),
    )


def choose_automatically(
    model: nn.Module,
    config: EngineConfig,
    machine: Machine,
    *,
    min_world_size: int,
    tokens_per_sample: int | None,
    activation_checkpointing: bool = False,
) -> StrategyChoice:
    """Choose a strategy. This is a pure function, so ranks that pass the same arguments choose the same strategy."""
    user = user_settings(config)
    workload = Workload(
        model=facts_of(model),
        micro_batch=config.plan.micro_batch,
        world_size=min_world_size,
        precision=NAMES[config.precision],
        sequence_length=tokens_per_sample,
        activation_checkpointing=activation_checkpointing,
        fsdp_ranks=config.local_world_size if config.fsdp.sharding == Sharding.HYBRID else None,
        fsdp_keeps_gathered=not config.fsdp.reshard_after_forward,
        global_batch=config.plan.global_batch,
        multiple_of=config.plan.multiple_of,
        built_in_place=machine.accelerator_bytes is None or any(each.is_cuda for each in model.parameters()),
        zero_bucket=named_size(user, BUCKET),
        zero_live=named_size(user, LIVE),
    )
    memory = Memory(
        accelerator_bytes=machine.accelerator_bytes or machine.host_bytes,
        host_bytes=machine.host_bytes,
        offloads=machine.accelerator_bytes is not None,
    )

    def allowed(estimate: Estimate) -> bool:
        if estimate.strategy == FSDP:
            return unfit_for_shards(model) is None
        if estimate.strategy != DEEPSPEED or estimate.zero_stage is None:
            return True
        # If ZeRO is used, it has to be at the stage that the job or a DeepSpeed JSON names.
        if not machine.has_deepspeed or named_stage(config.deepspeed, user) not in (None, estimate.zero_stage):
            return False
        return unfit_for_zero(model, estimate.zero_stage, config.precision) is None

    choice = choose_strategy(workload, memory, allowed=allowed)
    chosen = choice.estimate
    return StrategyChoice(
        strategy=chosen.strategy,
        zero_stage=chosen.zero_stage,
        offload_optimizer=chosen.offload_optimizer,
        offload_parameters=chosen.offload_parameters,
        name=chosen.name,
        reason=f"{choice.reason} {choice.remedy}".strip(),
        memory=MemoryEstimate(
            total=chosen.total,
            available=memory.accelerator_bytes,
            parameters=chosen.parameters,
            gradients=chosen.gradients,
            optimizer=chosen.optimizer,
            activations=chosen.activations,
            working=chosen.working,
            host=host_needed(chosen, workload, memory),
        ),
    )


def applied(choice: StrategyChoice, config: EngineConfig) -> EngineConfig:
    """Return the settings of an engine with the chosen ZeRO stage and offloading."""
    if choice.strategy == DEEPSPEED:
        chosen = config.deepspeed.model_copy(
            update={
                "zero_stage": choice.zero_stage,
                "offload_optimizer": choice.offload_optimizer,
                "offload_parameters": choice.offload_parameters,
            }
        )
        return replace(config, deepspeed=chosen)
    if choice.strategy == FSDP and choice.offload_parameters:
        return replace(config, fsdp=config.fsdp.model_copy(update={"offload": True}))
    return config


def facts_of(model: nn.Module) -> ModelFacts:
    """Read the facts off a model.

    Its largest embedding gives hidden units and vocabulary. Its blocks are the layers.
    """
    parameters = list(model.parameters())
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    largest = max(embeddings, key=lambda module: module.num_embeddings, default=None)
    return ModelFacts(
        num_parameters=_num_elements(parameters),
        num_trained=_num_elements(parameter for parameter in parameters if parameter.requires_grad),
        hidden=largest.embedding_dim if largest is not None else None,
        layers=len(find_blocks(model)) or None,
        vocabulary=largest.num_embeddings if largest is not None else 0,
        built_bytes=sum(num_bytes(parameter) for parameter in parameters if not parameter.is_meta),
        frozen_bytes=sum(num_bytes(parameter) for parameter in parameters if not parameter.requires_grad),
    )


def _num_elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
