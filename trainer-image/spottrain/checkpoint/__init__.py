"""Sharded, two-phase checkpoints for any world size, on files and object stores.

What a store holds:

    HEAD                                        the kept commits, newest first, and the fence (commits.py, head.py)
    attempts/g000003-s000000120-<unique>/       one save of generation 3 after step 120 (attempt.py)
        rank-00000.data                         raw bytes of the tensors that rank 0 wrote (dcp.py)
        rank-00000.frozen.data                  weights that aren't trained; later commits share it (frozen_files.py)
        rank-00000.receipt.json                 their places, size and checksums, and the rank's own state
        manifest.json                           all of that together, and the state that is not tensors

A save has three parts. Every rank stages its tensors (staging.py). Then a process beside the rank uploads them
(writer.py), and the rank leaves a receipt. Last, rank 0 writes the manifest and moves HEAD by compare-and-swap
(save_task.py).

Only what HEAD names exists. If HEAD itself is lost, it is rebuilt from the attempts that are whole (rebuild.py).
Nothing is pickled (codec.py). After a loss without notice, the memory of members may hold newer steps (peers/).
"""

from spottrain.checkpoint.checkpointer import Checkpointer
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
    StorageFull,
    StorageMissing,
    StorageUnavailable,
    UnsupportedState,
)
from spottrain.checkpoint.format.commits import Commit, Head
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.loading.loader import Loaded
from spottrain.checkpoint.peers.replicas import Replicas
from spottrain.checkpoint.saving.retention import Retention
from spottrain.checkpoint.saving.save_handle import SaveHandle
from spottrain.checkpoint.saving.writer import WriterProcess
from spottrain.checkpoint.stores.storage import CheckpointStorage
from spottrain.checkpoint.stores.uri import open_storage

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
    "Replicas",
    "Retention",
    "SaveFailed",
    "SaveHandle",
    "StepBehind",
    "StorageDenied",
    "StorageError",
    "StorageFull",
    "StorageMissing",
    "StorageUnavailable",
    "UnsupportedState",
    "WriterProcess",
    "open_storage",
    "read_head",
]
