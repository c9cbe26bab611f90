"""What a rank shares with the other ranks and with its agent while it trains."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from spottrain.world.drain import DrainFlag
from spottrain.world.failures import Drained
from spottrain.world.progress import ProgressReporter
from spottrain.world.stop_agreement import Ballot, StopAgreement


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank's place in the world: its number and device, and its ways to the other ranks and to the agent."""

    rank: int
    device: torch.device
    agreement: StopAgreement
    drain: DrainFlag
    reporter: ProgressReporter

    def sleep(self, seconds: float) -> None:
        """Sleep for so many whole seconds; raises Drained, on all ranks, as soon as one of them is to stop. A
        collective, for while no step is done that would be committed first."""
        for _ in range(math.ceil(seconds)):
            if self.agreement.settle(Ballot(drain=self.drain.is_set())).drain:
                raise Drained
            time.sleep(1.0)
