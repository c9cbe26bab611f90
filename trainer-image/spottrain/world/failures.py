"""Errors that end a rank, as failures of the contract, each with a sentence for the user."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from spottrain.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatch,
    CorruptCheckpoint,
    CredentialsMissing,
    Fenced,
    RankFailed,
    StorageDenied,
    StorageFull,
    StorageMissing,
    StorageUnavailable,
    StoreUnfit,
)
from spottrain.world.torch_limits import limit_of
from spottrain_api.contract.lost_peers import is_lost_peer, lost_peer_sentence
from spottrain_api.contract.reports import Failure, FailureReason
from spottrain_runtime.wording import clause, place_of, sentence_of, traceback_tail

_LIBRARY = Path(__file__).parents[1]
_REASONS: tuple[tuple[type[CheckpointError], FailureReason], ...] = (
    (StorageFull, FailureReason.CHECKPOINT_STORAGE_FULL),
    (StorageMissing, FailureReason.CHECKPOINT_STORAGE_MISSING),
    (CredentialsMissing, FailureReason.CHECKPOINT_ACCESS_DENIED),
    (StorageUnavailable, FailureReason.CHECKPOINT_STORAGE_UNAVAILABLE),
    (StoreUnfit, FailureReason.CHECKPOINT_STORE_UNFIT),
    (StorageDenied, FailureReason.CHECKPOINT_ACCESS_DENIED),
    (CheckpointMismatch, FailureReason.CHECKPOINT_INCOMPATIBLE),
    (CorruptCheckpoint, FailureReason.CHECKPOINT_DAMAGED),
    (Fenced, FailureReason.LOST_PEER),
)
OUT_OF_MEMORY = (
    ". Lower batch.micro, set activationCheckpointing, or use a strategy that needs less: `spottrain plan` shows "
    "what each needs."
)
# Start of DistributedDataParallel's message, in the loop of a framework that has spread the model.
_UNUSED_PARAMETERS = "Expected to have finished reduction in the prior iteration"
UNUSED_PARAMETERS = (
    "Some of the model's parameters had no part in the loss on a rank, and DDP needs all trained parameters in it. "
    "Let the framework find unused parameters (find_unused_parameters in its settings of DDP), or set requires_grad "
    "to False for those that are never used."
)
# Messages of torch's DataLoader about its worker processes: an error of the data set, and the end of a worker.
_RAISED_BY_WORKER = re.compile(
    r"\ACaught \w+ in DataLoader worker process .*"
    r"^  File \"(?P<file>[^\"]*)\", line (?P<line>\d+).*?\n(?P<error>\S.*)\Z",
    re.DOTALL | re.MULTILINE,
)
_LOST_WORKER = re.compile(
    r"DataLoader worker .*?(is killed by signal: [^.\n]*|exited unexpectedly)|Pin memory thread exited unexpectedly"
)
LOST_WORKER = (
    ". Most often, the container has exceeded its memory limit: lower num_workers or prefetch_factor, raise the "
    "limit, or hold less of the data set in memory."
)


# CUDA errors of the device, not of what ran on it: it is gone (Xid 79), or its memory or links have errors that can't
# be corrected. https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
_OF_DEVICE = re.compile(
    r"CUDA error: (uncorrectable ECC error|uncorrectable NVLink error|.* nvlink or a hardware error|unknown error"
    r"|no CUDA-capable device|CUDA-capable device\(s\) is/are busy|all CUDA-capable devices are busy"
    r"|system not yet initialized)",
    re.IGNORECASE,
)


class UserError(Exception):
    """A mistake that the user can correct. It is shown as a sentence, without a traceback."""

    def __init__(
        self, message: str, reason: FailureReason = FailureReason.INVALID_CONFIGURATION, *, fence: int | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.fence = fence


@contextmanager
def as_user_errors() -> Iterator[None]:
    """Turn a ValueError of this library into a UserError. It is a mistake in the configuration."""
    try:
        yield
    except ValidationError as error:
        sentences = "; ".join(_refused_setting(each) for each in error.errors(include_url=False))
        raise UserError(sentences) from error
    except ValueError as error:
        raise UserError(str(error)) from error


def _refused_setting(error: ErrorDetails) -> str:
    """A sentence on a setting whose value this version doesn't know."""
    name = ".".join(map(str, error["loc"])) or "the settings of the job"
    match error["type"]:
        case "enum":
            return f"{name} {error['input']!r} is unknown; use {error['ctx']['expected'].replace(chr(39), '')}"
        case "value_error":
            return f"{name} {error['input']!r} is not understood; {error['ctx']['error']}"
        case _:
            return f"{name} can't be read: {error['msg'][:1].lower()}{error['msg'][1:]}"


class Drained(SystemExit):
    """Ends the script after a drain, before it does what comes after training. Not an error: exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


def start_error(error: CheckpointError, *, resumes: bool) -> UserError:
    """The error of a checkpoint store or checkpoint that cannot be used at the start.

    Once a job has commits (`resumes`), a store that does not answer is an outage, which a later generation may
    survive.
    """
    reason = _reason(error, FailureReason.START_FAILED)
    if resumes and isinstance(error, StorageUnavailable):
        reason = FailureReason.START_FAILED
    return UserError(str(error), reason, fence=error.fence if isinstance(error, Fenced) else None)


def save_failure(error: CheckpointError) -> Failure:
    """Why a checkpoint was not made, or not read.

    The generation continues without it. If another rank's part failed, its error has the reason.
    """
    cause = error.cause if isinstance(error, RankFailed) else error
    return Failure(reason=_reason(cause, FailureReason.CHECKPOINT_SAVE_FAILED), message=str(error))


def _reason(error: CheckpointError, other: FailureReason) -> FailureReason:
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), other)


def failure_of(error: BaseException, rank: int) -> Failure | None:
    """The failure that an exception means; None if it means a normal end."""
    match error:
        case UserError():
            return Failure(reason=error.reason, message=str(error), exit_code=1, rank=rank, fence=error.fence)
        case SystemExit(code=None | 0):
            return None
        case SystemExit(code=code):
            number = code if isinstance(code, int) else 1
            said = f": {code}" if isinstance(code, str) else ""
            message = f"The script ended with exit code {number}{said}."
            return Failure(reason=FailureReason.SCRIPT_ERROR, message=message, exit_code=number, rank=rank)
        case KeyboardInterrupt():
            return Failure(reason=FailureReason.KILLED, message="The script was interrupted.", rank=rank)
        case _:
            return _of_exception(error, rank)


def _of_exception(error: BaseException, rank: int) -> Failure:
    if isinstance(error, Fenced):
        return Failure(reason=FailureReason.LOST_PEER, message=str(error), exit_code=1, rank=rank, fence=error.fence)
    if isinstance(error, CheckpointError):
        # Not a reason about checkpoints, because those are final: the store worked when this generation started.
        return Failure(reason=FailureReason.SCRIPT_ERROR, message=str(error), exit_code=1, rank=rank)
    last_line = sentence_of(error)
    lost_peer = is_lost_peer(f"{type(error).__module__}.{type(error).__qualname__}", str(error))
    reason = FailureReason.LOST_PEER if lost_peer else FailureReason.SCRIPT_ERROR
    if isinstance(error, RuntimeError) and _OF_DEVICE.search(str(error)):
        reason = FailureReason.DEVICE_FAILED
    place = place_of(error)
    where = f" ({place})" if place else ""
    message = (lost_peer_sentence(last_line) if lost_peer else last_line) + where
    if (raised := _RAISED_BY_WORKER.search(str(error))) is not None:
        message = f"{raised['error'].strip()} ({raised['file']}, line {raised['line']}, in a data worker)"
    if (lost := _LOST_WORKER.search(str(error))) is not None:
        message = lost[0] + LOST_WORKER
    if _UNUSED_PARAMETERS in str(error):
        message = UNUSED_PARAMETERS + where
    if isinstance(error, torch.OutOfMemoryError):
        message = clause(message) + OUT_OF_MEMORY
    if (advice := limit_of(error)) is not None:
        message = f"{clause(message)}. {advice}"
    tail = traceback_tail(_of_the_script(error.__traceback__))
    return Failure(reason=reason, message=message, exit_code=1, rank=rank, traceback=tail)


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of the session at its start. All of it if there are no others."""
    start = trace
    while start is not None and _is_of_session(Path(start.tb_frame.f_code.co_filename)):
        start = start.tb_next
    return start or trace


def _is_of_session(file: Path) -> bool:
    return file.is_relative_to(_LIBRARY) or str(file) == contextlib.__file__
