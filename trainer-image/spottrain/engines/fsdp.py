"""Shards: every rank holds a part of each parameter (FSDP2, `fully_shard`)."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from spottrain.engines.blocks import find_blocks
from spottrain.engines.native import NativeEngine


class FsdpEngine(NativeEngine):
    """Implements Engine. Gathers the blocks of the model one by one."""

    def _spread(self, model: nn.Module) -> nn.Module:
        model.to(self._config.device)
        for module in reversed(find_blocks(model, self._config.wrap)):  # inner ones first
            self._shard(module, self._policy(output_dtype=None))
        self._shard(model, self._policy(output_dtype=torch.float32))
        return model

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Gradients are averaged and sharded after every micro-batch: kept whole until the last one, they
        would take the memory that sharding is for."""

    def _shard(self, module: nn.Module, policy: MixedPrecisionPolicy) -> None:
        fully_shard(module, mp_policy=policy, reshard_after_forward=self._config.fsdp.reshard_after_forward)

    def _policy(self, output_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
        """Blocks hand on what they computed in (`output_dtype` None); the sums of gradients are in fp32, as
        sums of many small numbers lose too much in bf16."""
        if self._config.precision is torch.float32:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=self._config.precision, reduce_dtype=torch.float32, output_dtype=output_dtype
        )
