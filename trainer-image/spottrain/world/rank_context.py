"""What a rank shares with the other ranks and with its agent while it trains."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from spottrain.world.drain import DrainFlag
from spottrain.world.failures import Drained
from spottrain.world.listener import Rounds
from spottrain.world.progress import ProgressReporter
from spottrain.world.stop_agreement import Ballot, StopAgreement


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank's place in the world, and its ways to reach the other ranks and the agent.

    Attributes:
        rank: Number of this rank, from 0.
        device: Device on which it trains.
        agreement: By which the ranks agree to stop or to save.
        drain: Whether this rank has seen a request to drain.
        rounds: How the ranks agree to stop while a step is under way.
        reporter: Reports to the agent.
    """

    rank: int
    device: torch.device
    agreement: StopAgreement
    drain: DrainFlag
    rounds: Rounds
    reporter: ProgressReporter

    def sleep(self, seconds: float) -> None:
        """Sleep for so many whole seconds, while there is no step to commit. A collective.

        Raises:
            Drained: A rank has seen a request to drain; on all ranks.
        """
        for _ in range(math.ceil(seconds)):
            if self.agreement.settle(Ballot(drain=self.drain.is_set())).drain:
                raise Drained
            time.sleep(1.0)
