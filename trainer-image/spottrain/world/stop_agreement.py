"""How the ranks agree to stop, or to commit, after the same step. The agreement costs the step nothing.

At each step boundary, every rank starts an asynchronous sum of a small vector, on a gloo group that nothing else
uses, and reads the result at the *next* boundary. In the step between, the ranks have averaged their gradients, so
the sum is complete and no rank waits. All ranks read the same sums at the same boundary, so they take the same
decision there. The ranks follow a drain at most two steps after one of them has seen the flag.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

# A rank that has left the loop waits so long for the others before it says so.
USUAL_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """What one rank contributes at a step boundary.

    Attributes:
        drain: Whether it has seen a request to drain.
        commit: Whether a commit is due.
        replicate: Whether a replica in peers' memory is due.
        loss: Its share of the mean loss of the step before, if `has_loss`.
        has_loss: Whether it knows that share.
        save_seconds: Rank 0's forecast of a save, or 0. Only rank 0 sees the whole of a save.
        save_failed: Whether its part of the newest save failed, which rank 0 may not know.
        at_risk: Whether its node may be taken back soon.
        order: Fingerprint of the order of the next samples, a whole number below 2**20.
        left: Whether it has left the loop before the last step.
    """

    drain: bool = False
    commit: bool = False
    replicate: bool = False
    loss: float = 0.0
    has_loss: bool = False
    save_seconds: float = 0.0
    save_failed: bool = False
    at_risk: bool = False
    order: int = 0
    left: bool = False

    def votes(self) -> list[float]:
        """The numbers that are summed over the ranks."""
        return [
            *(self.drain, self.commit, self.replicate, self.loss, self.has_loss, self.save_seconds),
            *(self.save_failed, self.at_risk, self.left, self.order, self.order**2, 1.0),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What all ranks know about one step boundary.

    Attributes:
        drain: Whether any rank has seen a request to drain.
        commit: Whether any rank asked for a commit.
        replicate: Whether any rank asked for a replica in peers' memory.
        loss: Mean loss over the global batch, if known.
        save_seconds: Forecast of a save, if known.
        save_failed: Whether any rank's part of the newest save failed.
        at_risk: Whether any rank's node may be taken back soon.
        orders_differ: Whether the ranks are about to read in different orders.
        some_left: Whether some ranks have left the loop before the last step, and others have not.
    """

    drain: bool = False
    commit: bool = False
    replicate: bool = False
    loss: float | None = None
    save_seconds: float | None = None
    save_failed: bool = False
    at_risk: bool = False
    orders_differ: bool = False
    some_left: bool = False

    @classmethod
    def from_sums(cls, sums: Sequence[float]) -> Decision:
        """Make it from the sums of all ranks' votes."""
        drain, commit, replicate, loss, has_loss, save_seconds, save_failed, at_risk, left, order, squares, ranks = (
            sums
        )
        return cls(
            drain=drain > 0,
            commit=commit > 0,
            replicate=replicate > 0,
            loss=loss if has_loss else None,
            save_seconds=save_seconds or None,
            save_failed=save_failed > 0,
            at_risk=at_risk > 0,
            # Only of equal numbers is the mean of the squares the square of the mean.
            orders_differ=int(squares) * int(ranks) != int(order) ** 2,
            some_left=0 < left < ranks,
        )


class StopAgreement:
    """The running agreement of one rank. `group` None: a world of one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._sums = torch.zeros(len(Ballot().votes()), dtype=torch.float64, device="cpu")
        self._own = self._sums.numpy()  # the same memory, which is filled faster so
        self._is_pending = False
        self._work: dist.Work | None = None

    def start(self, ballot: Ballot) -> None:
        """Cast this rank's ballot. Every rank does so once at each boundary."""
        self._own[:] = ballot.votes()
        self._is_pending = True
        if self._group is not None:  # directly: what dist.all_reduce does besides takes as long as the rest
            self._work = self._group.allreduce([self._sums])

    def read(self) -> Decision:
        """The decision on the ballots of the last `start`. If there was none, the decision is to do nothing."""
        if not self._is_pending:
            return Decision()
        if self._work is not None:
            self._work.wait()
        self._is_pending, self._work = False, None
        return Decision.from_sums(self._own.tolist())

    def settle(self, ballot: Ballot, *, on_wait: Callable[[], None] | None = None) -> Decision:
        """Cast a ballot and wait for the decision, before the first step or after the last.

        `on_wait` is called if the other ranks need longer than usual.
        """
        self.read()
        self.start(ballot)
        if on_wait is not None and self._work is not None:
            ends = time.monotonic() + USUAL_SECONDS
            while not self._work.is_completed() and time.monotonic() < ends:
                time.sleep(0.01)
            if not self._work.is_completed():
                on_wait()
        return self.read()

    def total(self, values: list[float]) -> list[float]:
        """The sums of all ranks' values, the same on all. Every rank waits for the others."""
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
