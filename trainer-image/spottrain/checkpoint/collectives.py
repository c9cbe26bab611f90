"""How the ranks agree around a checkpoint, by small collectives on a gloo group of their own."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from spottrain import exchange
from spottrain.checkpoint.errors import CheckpointError, error_from_json, error_to_json

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Collectives:
    """Runs work so that either every rank succeeds or every rank raises. `group` None: a world of one."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int) -> None:
        self._group = group
        self._rank = rank

    def from_rank_0(self, work: Callable[[], T], kind: TypeAdapter[T]) -> T:
        """Do `work` on rank 0, and return its result, or raise its error, on all ranks.

        `kind` is the type of the result, which travels as JSON.
        """
        if self._group is None:
            return work()
        if self._rank != 0:
            answer = exchange.broadcast(None, self._group)
            if "error" in answer:
                raise error_from_json(answer["error"])
            return kind.validate_python(answer["result"])
        outcome = result_or_error(work)
        if isinstance(outcome, CheckpointError):
            exchange.broadcast({"error": error_to_json(outcome)}, self._group)
            raise outcome
        exchange.broadcast({"result": kind.dump_python(outcome, mode="json")}, self._group)
        return outcome

    def together(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank.

        If it fails on some ranks, all ranks raise the error of the lowest of them, because the reaction may be a
        collective.
        """
        outcome = result_or_error(work)
        (failed,), _ = self.any_and_token(isinstance(outcome, CheckpointError))
        return self.unless_failed(outcome, failed)

    def unless_failed(self, outcome: T | CheckpointError, failed: bool) -> T:
        """As `together`, for work that is already done. All ranks know already whether it `failed` on any of them."""
        first = self._first(outcome) if failed else None
        if first is not None:
            if isinstance(outcome, CheckpointError) and str(outcome) != str(first):
                logger.warning("On rank %d: %s", self._rank, outcome)
            raise first
        return outcome  # type: ignore[return-value]

    def first_error(self, work: Callable[[], None]) -> CheckpointError | None:
        """Do `work` on every rank, and return the error of the lowest that failed.

        All ranks return the same error.
        """
        outcome = result_or_error(work)
        (failed,), _ = self.any_and_token(isinstance(outcome, CheckpointError))
        return self._first(outcome) if failed else None

    def any_and_token(self, *flags: bool) -> tuple[list[bool], int]:
        """Which flags are set on any rank, and a random number of rank 0. One small reduction finds both."""
        any_of, token, _ = self.agree(*flags, digest=0)
        return any_of, token

    def agree(self, *flags: bool, digest: int) -> tuple[list[bool], int, bool]:
        """As `any_and_token`, and whether all ranks have the same digest, a number below 2**63."""
        token = secrets.randbits(63) if self._rank == 0 else 0
        values = torch.tensor([*flags, token, digest, -digest], dtype=torch.int64)
        if self._group is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        *any_of, token, most, least = values.tolist()
        return [bool(flag) for flag in any_of], token, most == -least

    def union(self, names: set[str]) -> set[str]:
        """The names that any rank gives, on all ranks."""
        if self._group is None:
            return names
        return set().union(*exchange.all_gather(sorted(names), self._group))

    def _first(self, outcome: object) -> CheckpointError | None:
        """The first error among the ranks' outcomes, once it is known that there is one."""
        error = outcome if isinstance(outcome, CheckpointError) else None
        if self._group is None:
            return error
        errors = exchange.all_gather(error_to_json(error) if error is not None else None, self._group)
        return error_from_json(next(each for each in errors if each is not None))


def result_or_error(work: Callable[[], T]) -> T | CheckpointError:
    """Do `work`, and return its result or the CheckpointError that it raised."""
    try:
        return work()
    except CheckpointError as error:
        return error
