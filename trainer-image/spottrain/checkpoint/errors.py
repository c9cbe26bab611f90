"""What can go wrong with checkpoints, each with a sentence for the person who runs the job."""

from __future__ import annotations


class CheckpointError(Exception):
    """Base of all errors of this package; `str(error)` is a sentence that says what to do."""


class StorageError(CheckpointError):
    """A store refused or failed an operation."""


class ObjectNotFound(StorageError):
    """There is no object of this key."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"There is no object {self.key!r} in the checkpoint store."


class PreconditionFailed(StorageError):
    """A conditional write lost: the object is not (or no longer) what the writer expected."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"Another writer changed {self.key!r} first."


class StorageUnavailable(StorageError):
    """The store did not answer, throttled for too long, or is full. The write may have taken effect."""


class StorageFull(StorageUnavailable):
    """There is no room, or the quota is used up."""


class StorageDenied(StorageError):
    """The store will never accept this request as it is: no access, a bad URI."""


class StorageMissing(StorageDenied):
    """There is no such bucket or folder (any more)."""


class Fenced(CheckpointError):
    """A newer generation, `fence`, has taken over: this process may not commit any more."""

    def __init__(self, message: str, fence: int) -> None:
        super().__init__(message, fence)
        self.fence = fence

    def __str__(self) -> str:
        return str(self.args[0])


class StepBehind(CheckpointError):
    """A commit of this step or a later one exists already, so this one would lose progress."""


class CorruptCheckpoint(CheckpointError):
    """Stored bytes are missing, cut short or altered."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint is sound but belongs to another model, strategy or format version."""


class UnsupportedState(CheckpointError):
    """The state holds a value that can't be stored without pickle."""


class SaveFailed(CheckpointError):
    """This save did not become a commit; the newest commit stands."""


class SharedWeightsGone(SaveFailed):
    """Frozen weights that this save refers to are not there any more; the next one writes them anew."""


class ExportFailed(CheckpointError):
    """A model could not be written to where it was to go."""
