"""Frozen weights: tensors that the script doesn't train.

They are written once (frozen_files.py). This module finds them, and notices if they change.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass, field

import torch.distributed as dist

from spottrain.checkpoint.collectives import Collectives
from spottrain.checkpoint.errors import FrozenWeightsGone
from spottrain.checkpoint.format.codec import Tensors
from spottrain.checkpoint.format.dcp import RankPlan
from spottrain.checkpoint.format.frozen_files import FrozenFiles
from spottrain.checkpoint.format.manifest import Entry, Manifest
from spottrain.checkpoint.saving.fingerprint import fingerprints, is_comparable
from spottrain.checkpoint.saving.known_plan import KnownPlan
from spottrain.checkpoint.saving.pieces import StagedPieces
from spottrain.checkpoint.saving.save_handle import SaveHandle
from spottrain.checkpoint.saving.staging import Staged, StagingBuffer
from spottrain_planner.memory_estimate import PIECE_BYTES

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenPart:
    """The part that frozen weights have in a save.

    Attributes:
        kept: Frozen weights of earlier commits, as rank 0 knows them.
        staged: What this rank writes to a file of frozen weights.
    """

    kept: FrozenFiles = field(default_factory=FrozenFiles)
    entries: tuple[Entry, ...] = ()
    staged: Staged | StagedPieces | None = None

    @property
    def memory_bytes(self) -> int:
        """Memory that it is staged in."""
        return getattr(self.staged, "piece_bytes", self.size)

    @property
    def size(self) -> int:
        return len(self.staged) if self.staged is not None else 0


class FrozenWeights:
    """One rank's view of the frozen weights.

    The script doesn't train them, and they keep their bytes. A script may itself change weights that it doesn't
    train, such as a teacher that follows by a moving average. So every save compares fingerprints. From a change on,
    such weights are saved like those that are trained.
    """

    def __init__(
        self,
        collectives: Collectives,
        *,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._piece_bytes = piece_bytes
        self._collectives = collectives
        self._rank = rank
        self._world_size = world_size
        self._stored = FrozenFiles()  # on rank 0, after a load on all
        self._seen: dict[str, int] = {}  # fingerprints of what was written or loaded
        self._changing: set[str] = set()
        self._changed: set[str] = set()  # of these, those that this rank has just noticed
        self._of_script: dict[str, int] = {}  # fingerprints before the load that is under way
        self._newest: SaveHandle | None = None
        self._plan = KnownPlan(rank=rank, group=group)
        self._staging: StagingBuffer | None = None  # ahead of a save

    def split(self, tensors: Tensors, frozen: Collection[str]) -> tuple[Tensors, Tensors]:
        """Separate the tensors that every commit holds itself from the frozen ones."""
        once = {
            name: tensor
            for name, tensor in tensors.items()
            if name in frozen and name not in self._changing and tensor.numel() and is_comparable(tensor)
        }
        return {name: tensor for name, tensor in tensors.items() if name not in once}, once

    def is_unwritten(self, frozen: Tensors) -> bool:
        """Whether this rank sees a frozen tensor that no commit holds as it is now."""
        self._note_newest()
        now = self._fingerprints({name: tensor for name, tensor in frozen.items() if name in self._seen})
        self._changed = {name for name, value in now.items() if value != self._seen[name]}
        return bool(self._changed or self._missing(frozen))

    def agree(self, frozen: Tensors) -> Tensors:
        """The tensors to write, if `is_unwritten` was true on any rank. A collective. Call `split` again after it."""
        self._changing |= self._collectives.union(self._changed)
        missing = self._collectives.union(self._missing(frozen))
        return {name: tensor for name, tensor in frozen.items() if name in missing - self._changing}

    def prepare(self, new: Tensors, room: float = math.inf) -> int:
        """Plan and allocate for `new`, the result of `agree`, in `room` bytes at most. A collective.

        Returns the number of bytes.
        """
        plan = self._planned(new)
        self._staging = StagingBuffer(self._piece_bytes)
        self._staging.prepare(plan, room)
        return self._staging.memory.content.numel()

    def stage(self, frozen: Tensors, new: Tensors, room: float = math.inf) -> FrozenPart:
        """Copy `new`, and keep those of `frozen` that are stored. A collective if `new` isn't empty."""
        kept = self._stored.only(frozen.keys() - new.keys())
        staging, self._staging = self._staging, None  # needed once, so not kept
        if not new:
            return FrozenPart(kept=kept)
        self._seen |= self._fingerprints(new)
        plan = self._planned(new)
        staged = (staging or StagingBuffer(self._piece_bytes)).stage_within(room, plan, new) if plan.size else None
        return FrozenPart(kept=kept, entries=plan.entries, staged=staged)

    def saving(self, handle: SaveHandle) -> None:
        """Note the newest save. Its end decides what is stored."""
        self._newest = handle

    def before_load(self, tensors: Tensors, frozen: Collection[str], manifest: Manifest) -> None:
        """Take fingerprints of what the script brought. The first try to load overwrites it."""
        stored = FrozenFiles.of(manifest).tensors or manifest.tensors
        brought = self._fingerprints({n: t for n, t in tensors.items() if n in frozen and n in stored})
        self._of_script = brought | self._of_script

    def loaded(self, tensors: Tensors, frozen: Collection[str], manifest: Manifest) -> set[str]:
        """Note that what was loaded is stored.

        Returns the names of tensors that the script brought with other values, among those that this rank looks at.
        """
        brought, self._of_script = self._of_script, {}
        now = self._fingerprints({name: tensors[name] for name in brought if name in tensors})
        self._newest, self._stored = None, FrozenFiles.of(manifest)
        self._seen = {name: value for name, value in now.items() if name in self._stored.tensors}
        # Weights that weren't trained but were saved like trained ones had changed.
        self._changing = {n for n in frozen if n in tensors and n not in self._seen} if manifest.shared else set()
        return {name for name, value in now.items() if brought[name] != value}

    def _missing(self, frozen: Tensors) -> set[str]:
        """What no commit holds, as far as this rank knows."""
        stored = self._stored.tensors if self._rank == 0 else self._seen
        return {name for name in frozen if name not in self._seen or name not in stored}

    def _note_newest(self) -> None:
        """Count the tensors of the newest save as stored if rank 0 knows of its commit."""
        handle = self._newest
        if handle is None or not handle.done:
            return
        self._newest = None
        if handle.commit is not None and handle.frozen_files is not None:
            self._stored = handle.frozen_files
        elif isinstance(handle.error, FrozenWeightsGone):
            self._stored = FrozenFiles()

    def _fingerprints(self, tensors: Tensors) -> dict[str, int]:
        return fingerprints(tensors, rank=self._rank, world_size=self._world_size)

    def _planned(self, new: Tensors) -> RankPlan:
        (outdated,), _ = self._collectives.any_and_token(self._plan.is_outdated(new))
        return self._plan.of(new, outdated=outdated)
