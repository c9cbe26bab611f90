"""What the ranks agree on before each update, so that they all make the same one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from spottrain.engines.buffers import SharedBuffers
from spottrain.engines.used import UsedParameters
from spottrain.world.launch import gloo_group


class StepAgreement:
    """Compares the ranks' buffers, and finds the parameters that none of them has used.

    The constructor is a collective.
    """

    def __init__(self, buffers: SharedBuffers, used: UsedParameters | None = None) -> None:
        self._buffers, self._used = buffers, used
        # A group of its own: the collectives of other groups may no longer match.
        self._group = gloo_group() if dist.get_world_size() > 1 else None

    def reach(self) -> None:
        """Call it before an update, or instead of one. A collective.

        Raises:
            UserError: The ranks have different buffers.
        """
        used = self._used.pop_step() if self._used is not None else []
        if self._group is not None:
            digest = self._buffers.digest()
            largest = torch.tensor([digest, -digest, *used])
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
            highest, lowest, *used = largest.tolist()
            if highest != -lowest:
                self._buffers.refuse_difference(self._group)
        if self._used is not None:
            self._used.clear_unused([bool(each) for each in used])
