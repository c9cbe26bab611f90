"""Shards: every rank holds a part of each parameter (FSDP2, `fully_shard`)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from spottrain.engines.blocks import find_blocks
from spottrain.engines.buffers import SharedBuffers, batch_norms
from spottrain.engines.engine import FULL, HYBRID, EngineConfig
from spottrain.engines.native import NativeEngine


class FsdpEngine(NativeEngine):
    """Implements Engine. Gathers the blocks of the model one by one."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ValueError, with a sentence, for settings that don't fit together."""
        super().__init__(config)
        sharding = config.fsdp.sharding
        if sharding not in (FULL, HYBRID):
            raise ValueError(f"fsdp.sharding {sharding!r} is unknown; use {FULL} or {HYBRID}")
        if sharding == HYBRID and config.plan.world_size % config.local_world_size:
            raise ValueError(
                f"fsdp.sharding {HYBRID} needs the same number of ranks on every node, and {config.plan.world_size} "
                f"ranks are not a multiple of {config.local_world_size}"
            )

    def _spread(self, model: nn.Module) -> nn.Module:
        """Each block is on the device as a whole only while it is sharded: the model needn't fit there."""
        mesh = self._mesh()
        self._scalars = [parameter for parameter in model.parameters() if parameter.dim() == 0]
        for scalar in self._scalars:
            scalar.data = scalar.data.to(self._config.device)
        if self._config.precision is not torch.float32:
            # They keep their statistics in fp32, and want their weights in the same.
            for norm in batch_norms(model):
                self._shard(norm, mesh, MixedPrecisionPolicy())
        for block in reversed(find_blocks(model, self._config.wrap)):  # inner ones first
            self._shard(block, mesh, self._policy(output_dtype=None))
        self._shard(model, mesh, self._policy(output_dtype=torch.float32))
        # What a rank hasn't used, such as an expert's parameters, has a gradient of zero there: all reduce the same.
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
        self._buffers = SharedBuffers(model)
        return model

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Gradients are averaged and sharded after every micro-batch: kept whole until the last one, they
        would take the memory that sharding is for. Those of scalars have no parts, and wait for the last one."""
        self._is_last = is_last

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        if self._is_last:
            self._average_scalars()

    def update(self) -> None:
        # What no rank has used is updated like anything else, as under ZeRO: a resumed rank looks for its state.
        for parameter in self._model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        super().update()
        self._buffers.share()

    def _average_scalars(self) -> None:
        """Parameters without dimensions can't be sharded: every rank has them whole."""
        for scalar in self._scalars:
            if scalar.requires_grad:
                scalar.grad = torch.zeros_like(scalar) if scalar.grad is None else scalar.grad
                dist.all_reduce(scalar.grad)
                scalar.grad /= dist.get_world_size()

    def _mesh(self) -> DeviceMesh:
        """All ranks in a row; or, hybrid, a row of shards for each node, whose columns are replicas."""
        device, world_size, local = self._config.device.type, dist.get_world_size(), self._config.local_world_size
        if self._config.fsdp.sharding == FULL or local == world_size:
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
            ignored_params=set(self._scalars),
            offload_policy=CPUOffloadPolicy(pin_memory=on_cuda) if settings.offload else OffloadPolicy(),
        )

    def _policy(self, output_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
        """Blocks hand on what they computed in (`output_dtype` None); the sums of gradients are in fp32, as
        sums of many small numbers lose too much in bf16."""
        if self._config.precision is torch.float32:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=self._config.precision, reduce_dtype=torch.float32, output_dtype=output_dtype
        )
