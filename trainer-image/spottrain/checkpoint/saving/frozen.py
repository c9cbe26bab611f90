"""Frozen weights: tensors that the script doesn't train are written once (frozen_files.py). This module finds them,
and notices if they change."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from spottrain.checkpoint.collectives import Collectives
from spottrain.checkpoint.errors import FrozenWeightsGone
from spottrain.checkpoint.format.codec import Tensors
from spottrain.checkpoint.format.dcp import RankPlan, plan_save, signature
from spottrain.checkpoint.format.frozen_files import FrozenFiles
from spottrain.checkpoint.format.manifest import Entry, Manifest
from spottrain.checkpoint.saving.fingerprint import fingerprints, is_comparable
from spottrain.checkpoint.saving.save_handle import SaveHandle
from spottrain.checkpoint.saving.staging import Staged, StagingBuffer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenPart:
    """What a save has of frozen weights."""

    kept: FrozenFiles = field(default_factory=FrozenFiles)
    """Of earlier commits; as rank 0 knows it."""
    entries: tuple[Entry, ...] = ()
    staged: Staged | None = None
    """What this rank writes to a file of frozen weights."""

    @property
    def size(self) -> int:
        return len(self.staged.data) if self.staged is not None else 0


class FrozenWeights:
    """One rank's view. Frozen is what the script doesn't train and what keeps its bytes.

    A script may change by itself what it doesn't train, such as a teacher that follows by a moving average. So every
    save compares fingerprints, and what has changed is saved like what is trained from then on.
    """

    def __init__(
        self, collectives: Collectives, *, rank: int, world_size: int, group: dist.ProcessGroup | None
    ) -> None:
        self._collectives = collectives
        self._rank = rank
        self._world_size = world_size
        self._group = group
        self._stored = FrozenFiles()  # on rank 0, after a load on all
        self._seen: dict[str, int] = {}  # fingerprints of what was written or loaded
        self._changing: set[str] = set()
        self._changed: set[str] = set()  # of these, what this rank has just noticed
        self._of_script: dict[str, int] = {}  # fingerprints before the load that is under way
        self._newest: SaveHandle | None = None
        self._plan: tuple[RankPlan, tuple[Any, ...]] | None = None
        self._staging: StagingBuffer | None = None  # ahead of a save

    def split(self, tensors: Tensors, frozen: Collection[str]) -> tuple[Tensors, Tensors]:
        """Part a state's tensors into what every commit has of its own, and what is frozen."""
        once = {
            name: tensor
            for name, tensor in tensors.items()
            if name in frozen and name not in self._changing and tensor.numel() and is_comparable(tensor)
        }
        return {name: tensor for name, tensor in tensors.items() if name not in once}, once

    def is_unwritten(self, frozen: Tensors) -> bool:
        """Whether something of it is not in a commit as it is now, as this rank sees it."""
        self._hear_of_newest()
        now = self._fingerprints({name: tensor for name, tensor in frozen.items() if name in self._seen})
        self._changed = {name for name, value in now.items() if value != self._seen[name]}
        return bool(self._changed or self._missing(frozen))

    def agree(self, frozen: Tensors) -> Tensors:
        """What has to be written, where any rank's `is_unwritten` was true. A collective; `split` anew after it."""
        self._changing |= self._collectives.union(self._changed)
        missing = self._collectives.union(self._missing(frozen))
        return {name: tensor for name, tensor in frozen.items() if name in missing - self._changing}

    def prepare(self, new: Tensors) -> None:
        """Plan and allocate for `new`, which `agree` has named. A collective."""
        plan = self._planned(new)
        self._staging = StagingBuffer()
        self._staging.prepare(plan)

    def stage(self, frozen: Tensors, new: Tensors) -> FrozenPart:
        """Copy `new`, and keep of `frozen` what is stored. A collective where there is something new."""
        kept = self._stored.only(frozen.keys() - new.keys())
        staging, self._staging = self._staging, None  # needed once: not kept for the next
        if not new:
            return FrozenPart(kept=kept)
        self._seen |= self._fingerprints(new)
        plan = self._planned(new)
        staged = (staging or StagingBuffer()).stage(plan, new) if plan.size else None
        return FrozenPart(kept=kept, entries=plan.entries, staged=staged)

    def saving(self, handle: SaveHandle) -> None:
        """Note the newest save, whose end says what is stored."""
        self._newest = handle

    def before_load(self, tensors: Tensors, frozen: Collection[str], manifest: Manifest) -> None:
        """Look at what the script brought, which the first try to load overwrites."""
        stored = FrozenFiles.of(manifest).tensors or manifest.tensors
        brought = self._fingerprints({n: t for n, t in tensors.items() if n in frozen and n in stored})
        self._of_script = brought | self._of_script

    def loaded(self, tensors: Tensors, frozen: Collection[str], manifest: Manifest) -> set[str]:
        """Take what was loaded for what is stored; the names of what the script brought with other values, of what
        this rank looks at."""
        brought, self._of_script = self._of_script, {}
        now = self._fingerprints({name: tensors[name] for name in brought if name in tensors})
        self._newest, self._stored = None, FrozenFiles.of(manifest)
        self._seen = {name: value for name, value in now.items() if name in self._stored.tensors}
        # What was saved like the trained weights, though it wasn't trained, had changed.
        self._changing = {n for n in frozen if n in tensors and n not in self._seen} if manifest.shared else set()
        return {name for name, value in now.items() if brought[name] != value}

    def _missing(self, frozen: Tensors) -> set[str]:
        """What no commit has, as far as this rank can know."""
        stored = self._stored.tensors if self._rank == 0 else self._seen
        return {name for name in frozen if name not in self._seen or name not in stored}

    def _hear_of_newest(self) -> None:
        """What a save wrote is stored once rank 0 knows of the commit; not if that failed, or isn't known."""
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
        now = signature(new)
        (changed,), _ = self._collectives.any_and_token(self._plan is None or self._plan[1] != now)
        if changed or self._plan is None:
            self._plan = plan_save(new, rank=self._rank, group=self._group), now
        return self._plan[0]
