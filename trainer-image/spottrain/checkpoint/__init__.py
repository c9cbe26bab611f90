"""Sharded, two-phase checkpoints for any world size, on files and object stores."""

from spottrain.checkpoint.checkpointer import Checkpointer, Loaded
from spottrain.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatch,
    CorruptCheckpoint,
    Fenced,
    ObjectNotFound,
    PreconditionFailed,
    SaveFailed,
    StepBehind,
    StorageDenied,
    StorageError,
    StorageUnavailable,
    UnsupportedState,
)
from spottrain.checkpoint.head import Commit, Head, read_head
from spottrain.checkpoint.persist import SaveHandle
from spottrain.checkpoint.retention import Retention
from spottrain.checkpoint.storage import CheckpointStorage, open_storage

__all__ = [
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointStorage",
    "Checkpointer",
    "Commit",
    "CorruptCheckpoint",
    "Fenced",
    "Head",
    "Loaded",
    "ObjectNotFound",
    "PreconditionFailed",
    "Retention",
    "SaveFailed",
    "SaveHandle",
    "StepBehind",
    "StorageDenied",
    "StorageError",
    "StorageUnavailable",
    "UnsupportedState",
    "open_storage",
    "read_head",
]
