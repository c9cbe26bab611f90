"""Errors of checkpoints, each with a sentence for the person who runs the job."""

from __future__ import annotations

from typing import Any


class CheckpointError(Exception):
    """Base of all errors of this package. `str(error)` is a sentence that says what to do."""


class StorageError(CheckpointError):
    """A store refused or failed an operation."""


class ObjectNotFound(StorageError):
    """The store holds no object with this key."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"There is no object {self.key!r} in the checkpoint store."


class PreconditionFailed(StorageError):
    """A conditional write lost: the object is not what the writer expected. It never was, or has changed since."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"Another writer changed {self.key!r} first."


class StorageUnavailable(StorageError):
    """The store did not answer, throttled for too long, or is full. A write may have taken effect."""


class StorageFull(StorageUnavailable):
    """The store has no room, or the quota is used up."""


class CredentialsMissing(StorageUnavailable):
    """No credentials were found, maybe only for now.

    They may come from a node's metadata server, which may be slow.
    """


class StorageDenied(StorageError):
    """The store will never accept this request as it is. Access is denied, or the URI is invalid."""


class StorageMissing(StorageDenied):
    """The bucket or folder does not exist, or not any more."""


class StoreUnfit(StorageDenied):
    """The store does not do what checkpoints need, such as conditional writes."""


class Fenced(CheckpointError):
    """A newer generation, `fence`, has taken over, or another start of the same one.

    This process may not commit any more.
    """

    def __init__(self, message: str, fence: int) -> None:
        super().__init__(message, fence)
        self.fence = fence

    def __str__(self) -> str:
        return str(self.args[0])


class StepBehind(CheckpointError):
    """A commit of this step or of a later one exists already. This one would lose progress."""


class CorruptCheckpoint(CheckpointError):
    """Stored bytes are missing, cut short or altered."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint is whole, but does not fit the run.

    It belongs to a different model, strategy or format version.
    """


class UnsupportedState(CheckpointError):
    """The state holds a value that can't be stored without pickle."""


class RanksDiffer(CheckpointError):
    """The ranks have different values of what a checkpoint holds once for all of them, under the name `name`."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message, name)
        self.name = name

    def __str__(self) -> str:
        return str(self.args[0])


class SaveFailed(CheckpointError):
    """This save did not become a commit. The newest commit is still valid."""


class RankFailed(SaveFailed):
    """This save was given up, because another rank's part failed, with the error `cause`."""

    def __init__(self, step: int, rank: int, encoded: list[Any]) -> None:
        """`encoded` is the JSON of the rank's error, from `error_to_json`."""
        super().__init__(step, rank, encoded)
        self.cause = error_from_json(encoded)

    def __str__(self) -> str:
        step, rank, _ = self.args
        return f"The checkpoint at step {step} was given up, because rank {rank} failed: {self.cause}"


class CleanUpFailed(StorageError):
    """Objects that no commit needs could not be deleted."""


class FrozenWeightsGone(SaveFailed):
    """Frozen weights that this save refers to are gone. The next save writes them again."""


class ExportFailed(CheckpointError):
    """A model could not be exported."""


def error_to_json(error: CheckpointError) -> list[Any]:
    """Return an error as JSON, for the other ranks.

    It names the nearest class of this module, and has the error's arguments.
    """
    kind = next(kind for kind in type(error).__mro__ if kind.__module__ == __name__)
    return [kind.__name__, *(arg if isinstance(arg, (int, list)) else str(arg) for arg in error.args)]


def error_from_json(encoded: list[Any]) -> CheckpointError:
    """Return the error of a JSON from `error_to_json`.

    A class that this version doesn't know becomes a CheckpointError.
    """
    name, *args = encoded
    kind = globals().get(name)
    known = isinstance(kind, type) and issubclass(kind, CheckpointError)
    return kind(*args) if known else CheckpointError(*args)  # type: ignore[misc]
