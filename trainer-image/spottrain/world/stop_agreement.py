"""How the ranks agree to stop, or to commit, after the same step, at no cost to the step.

At each step boundary every rank starts an asynchronous sum of a small vector, on a gloo group that nothing
else uses, and reads the result at the *next* boundary. By then the step in between has made all ranks meet in
their gradients, so the sum is there and nobody waits. All ranks read the same sums at the same boundary, so
they take the same decision there. A drain is thus followed at most two steps after its flag was seen.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """What one rank says at a boundary."""

    drain: bool = False
    commit: bool = False
    replicate: bool = False
    loss: float = 0.0  # this rank's share of the mean loss of the step before, if `has_loss`
    has_loss: bool = False
    save_seconds: float = 0.0  # rank 0's forecast of a save, if it has one; only rank 0 sees the whole of a save
    save_failed: bool = False  # this rank's part of the newest save, which rank 0 may not know


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What all ranks know of one boundary: whether any rank asked for a drain, a commit or a replica in peers'
    memory, the mean loss, how long a save is expected to take, and whether any rank's part of one failed."""

    drain: bool = False
    commit: bool = False
    replicate: bool = False
    loss: float | None = None
    save_seconds: float | None = None
    save_failed: bool = False


class StopAgreement:
    """The running agreement of one rank. `group` None: a world of one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._pending: tuple[torch.Tensor, dist.Work | None] | None = None

    def start(self, ballot: Ballot) -> None:
        """Cast this rank's ballot; every rank does, once a boundary."""
        votes = torch.tensor(astuple(ballot), dtype=torch.float64, device="cpu")
        work = None
        if self._group is not None:
            work = dist.all_reduce(votes, op=dist.ReduceOp.SUM, group=self._group, async_op=True)
        self._pending = votes, work

    def read(self) -> Decision:
        """The decision on the ballots of the last `start`; a decision for nothing where there was none."""
        if self._pending is None:
            return Decision()
        votes, work = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        drain, commit, replicate, loss, has_loss, save_seconds, save_failed = votes.tolist()
        return Decision(
            drain=drain > 0,
            commit=commit > 0,
            replicate=replicate > 0,
            loss=loss if has_loss else None,
            save_seconds=save_seconds or None,
            save_failed=save_failed > 0,
        )

    def settle(self, ballot: Ballot) -> Decision:
        """Cast a ballot and wait for the decision, where no step lies in between (before the first, after
        the last)."""
        self.read()
        self.start(ballot)
        return self.read()

    def total(self, values: list[float]) -> list[float]:
        """The sums of all ranks' values, the same on all; every rank waits for the others."""
        sums = torch.tensor(values, dtype=torch.float64, device="cpu")
        if self._group is not None:
            dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=self._group)
        return sums.tolist()

    def least(self, value: float) -> float:
        """The smallest of all ranks' values; every rank waits for the others."""
        smallest = torch.tensor([value], dtype=torch.float64, device="cpu")
        if self._group is not None:
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self._group)
        return smallest.item()
