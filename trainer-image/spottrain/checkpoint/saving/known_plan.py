"""The plan of a save, which holds as long as the tensors of all ranks keep their structure."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from spottrain.checkpoint.format import codec
from spottrain.checkpoint.format.dcp import RankPlan, plan_save, signature


class KnownPlan:
    """The newest plan that the ranks agreed on."""

    def __init__(self, *, rank: int, group: dist.ProcessGroup | None) -> None:
        self._rank = rank
        self._group = group
        self._known: tuple[RankPlan, tuple[Any, ...]] | None = None

    def is_outdated(self, tensors: codec.Tensors) -> bool:
        """Whether this rank's tensors differ in structure from those of the plan."""
        return self._known is None or self._known[1] != signature(tensors)

    def of(self, tensors: codec.Tensors, *, outdated: bool) -> RankPlan:
        """The plan of these tensors. A collective if it is outdated on a rank, which all ranks have to know."""
        if outdated or self._known is None:
            self._known = plan_save(tensors, rank=self._rank, group=self._group), signature(tensors)
        return self._known[0]
