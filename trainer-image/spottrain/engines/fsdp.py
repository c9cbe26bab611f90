"""Shards: every rank holds a part of each parameter (FSDP2, `fully_shard`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim import Optimizer

from spottrain.engines.blocks import find_blocks, used_from_outside
from spottrain.engines.buffers import batch_norms, copy_from_first
from spottrain.engines.engine import EngineConfig, MakeOptimizer
from spottrain.engines.gathered import GatheredParameters
from spottrain.engines.model_state import unfit_for_shards
from spottrain.engines.native import NativeEngine
from spottrain.engines.same_order import SameBlocks
from spottrain.engines.sharded_state import ShardedState
from spottrain.engines.used import SECOND_GRADIENT, UsedParameters
from spottrain.world.failures import UserError
from spottrain_api.settings.choices import Sharding


class FsdpEngine(ShardedState, NativeEngine):
    """Implements Engine. Gathers the blocks of the model one by one.

    Parameters that can't be sharded are whole on every rank. `implicit_replication` lets an optimizer update them
    together with shards.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Check that the settings fit together.

        Raises:
            ValueError: They don't. The message is a sentence for the user.
        """
        super().__init__(config)
        sharding = config.fsdp.sharding
        if sharding == Sharding.HYBRID and config.plan.world_size % config.local_world_size:
            raise ValueError(
                f"fsdp.sharding hybrid needs the same number of ranks on every node, and {config.plan.world_size} "
                f"ranks are not a multiple of {config.local_world_size}"
            )

    def _spread(self, model: nn.Module) -> nn.Module:
        """Shard the model block by block.

        Only one block at a time is whole on the device, so the model needn't fit there.

        Raises:
            UserError: A block can't be gathered as one, or a weight can't be sharded.
        """
        if (refusal := unfit_for_shards(model)) is not None:
            raise UserError(refusal)
        mesh, is_fp32 = self._mesh(), self._config.precision is torch.float32
        for parameter in model.parameters():
            if parameter.layout is torch.strided and not parameter.is_contiguous():  # as in channels_last
                parameter.data = parameter.data.contiguous()
        # Batch norms keep their statistics in fp32, and need their weights in the same type.
        norms = [] if is_fp32 else batch_norms(model)
        blocks = list(reversed(find_blocks(model, self._config.wrap)))  # inner ones first
        for block, parameter in used_from_outside(model, blocks):
            raise UserError(_sentence_on_sharing(model, block, parameter))
        self._whole = list(kept_whole([*norms, *blocks, model]))
        for parameter in self._whole:
            parameter.data = parameter.data.to(self._config.device)
        for norm in norms:
            self._shard(norm, mesh, MixedPrecisionPolicy())
        for block in blocks:
            self._shard(block, mesh, self._policy(output_dtype=None))
        self._shard(model, mesh, self._policy(output_dtype=torch.float32))
        self._copy_to_replicas(model, mesh)
        self._gathered = GatheredParameters(model)
        gathered = {name: module for name, module in model.named_modules() if module in {*norms, *blocks}}
        self._same_blocks = None
        if gathered and dist.get_world_size() > 1:
            self._same_blocks = SameBlocks(gathered, kept=not self._config.fsdp.reshard_after_forward)
        if dist.get_world_size() > 1:
            # Parameters that a rank hasn't used, such as an expert's, get a gradient of zero there, so that all ranks
            # reduce the same ones.
            model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
        return model

    def _watch(self, used: UsedParameters) -> None:
        for parameter in self._whole:
            if parameter in used:
                used.watch(parameter)
        self._gathered.watch(used)

    def check_all_sharded(self) -> None:
        """Raise UserError for a trained parameter that is whole on every rank: only `backward` averages it."""
        whole = {each for each in self._whole if each.requires_grad}
        for name, parameter in self._model.named_parameters():
            if parameter in whole:
                raise UserError(
                    f"the parameter {name} (shape {list(parameter.shape)}, {parameter.dtype}) can't be sharded, so "
                    "that its gradient would differ between ranks in a loop of the script's own. Give it a dimension "
                    "and the type of the other weights, as in nn.Parameter(torch.ones(1)), or use the strategy ddp"
                )

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        wrapped = super().wrap(model, optimizer)
        self._read()
        return wrapped

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Prepare the reductions of a micro-batch.

        FSDP2 reduces gradients to shards after every micro-batch. If they were kept whole until the last one, they
        would take the memory that sharding saves. Two reductions wait for the last micro-batch: that of parameters
        that aren't sharded, and, under hybrid sharding, the all-reduce over the nodes. Until then the device keeps
        this rank's shards of the gradients, also with offload.
        """
        self._is_last = is_last
        if self._config.fsdp.sharding == Sharding.HYBRID:
            self._model.set_requires_all_reduce(is_last)  # type: ignore[operator]

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward; a collective. Raises UserError if the ranks didn't call the same blocks."""
        if self._same_blocks is not None:
            self._same_blocks.compare()
        super().backward(loss)
        if self._same_blocks is not None:
            self._same_blocks.check()
        if (name := self._gathered.first()) is not None:
            raise UserError(SECOND_GRADIENT.format(name))
        if self._is_last:
            self._average_whole()

    def update(self) -> None:
        self._trained.check(may_freeze=True)
        with implicit_replication():
            super().update()

    def gradients_are_finite(self) -> bool:
        with implicit_replication():
            return super().gradients_are_finite()

    # The next two may create the optimizer's state, by a step of the optimizer.

    def state(self) -> dict[str, Any]:
        with implicit_replication():
            return super().state()

    def load_state(self, state: dict[str, Any]) -> None:
        with implicit_replication():
            super().load_state(state)

    def _copy_to_replicas(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Give all copies the values of the first rank that has them.

        A script may seed each rank differently. Under full sharding, only the whole parameters have copies. Under
        hybrid sharding, shards have copies, too.
        """
        copy_from_first(parameter.detach() for parameter in self._whole)
        if mesh.ndim == 2:
            shards = (each.to_local().detach() for each in model.parameters() if isinstance(each, DTensor))
            copy_from_first(shards, mesh.get_group("replicas"))

    def _average_whole(self) -> None:
        """Average the gradients of the parameters that every rank has whole."""
        under_way = []
        for parameter in self._whole:
            if parameter.requires_grad and parameter.numel():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                under_way.append((parameter.grad, dist.all_reduce(parameter.grad, async_op=True)))
        for gradient, work in under_way:
            work.wait()
            gradient /= dist.get_world_size()

    def _mesh(self) -> DeviceMesh:
        """A row of all ranks, or a grid if hybrid.

        The grid has a row of shards for each node, with replicas in the columns.
        """
        device, world_size, local = self._config.device.type, dist.get_world_size(), self._config.local_world_size
        if self._config.fsdp.sharding == Sharding.FULL or local == world_size:
            return init_device_mesh(device, (world_size,))
        return init_device_mesh(device, (world_size // local, local), mesh_dim_names=("replicas", "shards"))

    def _shard(self, module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
        settings = self._config.fsdp
        on_cuda = self._config.device.type == "cuda"
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=settings.reshard_after_forward,
            ignored_params=set(self._whole),
            offload_policy=CPUOffloadPolicy(pin_memory=on_cuda) if settings.offload else OffloadPolicy(),
        )

    def _policy(self, output_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
        """The types to compute, reduce and return in. `output_dtype` None: return the type that is computed in.

        Gradients are summed in fp32, because sums of many small numbers lose too much in bf16.
        """
        if self._config.precision is torch.float32:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=self._config.precision, reduce_dtype=torch.float32, output_dtype=output_dtype
        )


def _sentence_on_sharing(model: nn.Module, block: nn.Module, parameter: nn.Parameter) -> str:
    name = next(name for name, module in model.named_modules() if module is block)
    shared = next(name for name, other in model.named_parameters() if other is parameter)
    return (
        f"The module {name} is to be gathered as one, as `wrap` says, but other modules use its parameter {shared} "
        f"too; leave {type(block).__name__} out of `wrap`, or use the strategy ddp."
    )


def kept_whole(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """Parameters that FSDP2 can't shard.

    - Parameters without dimensions or without elements.
    - Complex ones: FSDP2 would add up their gradients wrongly.
    - Trained ones of a different type than most of their module, such as a few norms in fp32 among weights in bf16.

    Args:
        modules: The modules that are gathered one by one, inner ones first.
    """
    seen: set[nn.Parameter] = set()
    for module in modules:
        own = [parameter for parameter in module.parameters() if parameter not in seen]
        seen.update(own)
        sizes: Counter[torch.dtype] = Counter()
        for parameter in own:
            if parameter.requires_grad and _is_divisible(parameter):
                sizes[parameter.dtype] += parameter.numel()
        usual = {dtype for dtype, _ in sizes.most_common(1)}
        for parameter in own:
            if not _is_divisible(parameter) or (parameter.requires_grad and parameter.dtype not in usual):
                yield parameter


def _is_divisible(parameter: nn.Parameter) -> bool:
    return parameter.dim() > 0 and parameter.numel() > 0 and not parameter.is_complex()
