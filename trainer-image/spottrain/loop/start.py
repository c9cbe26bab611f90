"""The start of a loop: the ranks agree on its length, resume, and begin to read."""

from __future__ import annotations

from typing import Any

from spottrain.checkpoint.errors import CheckpointError
from spottrain.data import random_state
from spottrain.data.loader import MicroBatches
from spottrain.data.own_data import NoBatches, OwnData
from spottrain.data.rank_data import RankData
from spottrain.recovery.recovery import Recovery
from spottrain.recovery.training_state import TrainingState
from spottrain.world.failures import UserError, as_user_errors, start_error
from spottrain.world.rank_context import RankContext
from spottrain.world.stop_agreement import StopAgreement
from spottrain_api.contract.reports import TrainerPhase

OTHER_TOTALS = (
    "The total of steps is {:.0f} on one rank and {:.0f} on another. Pass the same number on all ranks: the "
    "job makes each step with all of them."
)
OTHER_LENGTHS = (
    "The data set has {:.0f} samples on one rank and {:.0f} on another. Give every rank the whole data set: the "
    "session shares it out."
)
OTHER_EPOCHS = (
    "The number of epochs is {:.0f} on one rank and {:.0f} on another. Pass the same number to training.epochs on "
    "all ranks."
)


def agree(
    data: RankData | OwnData, length: int, *, by_epoch: bool, last_step: int | None, context: RankContext
) -> dict[str, Any]:
    """Agree on the run, and begin its data. A collective.

    Args:
        data: What the ranks read.
        length: In steps, or in epochs if it is `by_epoch`.
        by_epoch: Whether each epoch ends with a batch of what is left.
        last_step: Steps after which a run of epochs ends, also inside one.
        context: The rank's ways to reach the other ranks.

    Returns:
        What must not differ between this run and the one that saved.

    Raises:
        UserError: The ranks differ, or the data do not fit the run.
    """
    _require_same(context.agreement, length, OTHER_EPOCHS if by_epoch else OTHER_TOTALS)
    if by_epoch:
        _require_same(context.agreement, -1 if last_step is None else last_step, OTHER_TOTALS)
    _require_same(context.agreement, data.order.num_samples, OTHER_LENGTHS)
    with as_user_errors():
        return data.begin(length, by_epoch=by_epoch, last_step=last_step)


def resume(state: TrainingState, data: RankData | OwnData, *, context: RankContext, recovery: Recovery) -> int:
    """Load the newest commit, and prepare the first save. A collective. Returns the step; raises UserError."""
    seed, rank = data.order.seed, context.rank
    random_state.seed_everything(seed, rank=rank)
    try:
        step = recovery.restorer.resume(state, seed=seed, rank=rank, sleep=context.sleep)
        recovery.saver.prepare(state, step)
    except CheckpointError as error:
        recovery.reports.failed(error)
        raise start_error(error, resumes=True) from error
    if rank == 0 and step > 0:
        recovery.reports.resumed(step)
    return step


def read_from(step: int, data: RankData | OwnData, context: RankContext) -> MicroBatches | NoBatches:
    """Report the start, and begin to read. Raises UserError."""
    length = data.batches.expected_steps(step)
    context.reporter.update(phase=TrainerPhase.TRAINING, step=step, start_step=step, total_steps=length)
    context.reporter.milestone("loaded")  # last: a reader who sees it also sees the first step
    with as_user_errors():
        return data.load(first_step=step, device=context.device)


def _require_same(agreement: StopAgreement, number: int, otherwise: str) -> None:
    least, most = agreement.least(number), -agreement.least(-number)
    if least != most:
        raise UserError(otherwise.format(least, most))
