"""Shards: every rank holds a part of each parameter (FSDP2, `fully_shard`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from spottrain.engines.native import NativeEngine


class FsdpEngine(NativeEngine):
    """Implements Engine. Gathers the modules of the classes `wrap` one by one, by default the items of every
    outermost ModuleList, which is where models keep their blocks."""

    def _spread(self, model: nn.Module) -> nn.Module:
        model.to(self._config.device)
        for module in self._blocks(model):
            self._shard(module, self._policy(output_dtype=None))
        self._shard(model, self._policy(output_dtype=torch.float32))
        return model

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Gradients are averaged and sharded after every micro-batch: kept whole until the last one, they
        would take the memory that sharding is for."""

    def _shard(self, module: nn.Module, policy: MixedPrecisionPolicy) -> None:
        fully_shard(module, mp_policy=policy, reshard_after_forward=self._config.reshard_after_forward)

    def _policy(self, output_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
        """Blocks hand on what they computed in (`output_dtype` None); the sums of gradients are in fp32, as
        sums of many small numbers lose too much in bf16."""
        if self._config.precision is torch.float32:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=self._config.precision, reduce_dtype=torch.float32, output_dtype=output_dtype
        )

    def _blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        """Inner modules first, as fully_shard wants them."""
        classes = self._config.wrap
        if classes is None:
            yield from _items_of_lists(model)
            return
        found = [module for module in model.modules() if isinstance(module, tuple(classes)) and module is not model]
        if classes and not found:
            names = ", ".join(sorted(cls.__name__ for cls in classes))
            raise ValueError(f"the model has no module of the classes to wrap ({names}); name others, or none")
        yield from reversed(found)


def _items_of_lists(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (item for item in child if not isinstance(item, FSDPModule))
        else:
            yield from _items_of_lists(child)
