"""How the ranks of a job verify its commits, and read the state and the values beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from spottrain.checkpoint.collectives import Collectives
from spottrain.checkpoint.errors import CorruptCheckpoint
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.format.commits import Commit
from spottrain.checkpoint.format.described import described
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.format.manifest import Manifest, read_manifest
from spottrain.checkpoint.format.part_reader import PartReader
from spottrain.checkpoint.loading.fill_state import filled, tensors_of
from spottrain.checkpoint.saving.frozen import FrozenWeights
from spottrain.checkpoint.stores.storage import CheckpointStorage

logger = logging.getLogger(__name__)

Room = Callable[[dict[str, Any]], dict[str, Any]]
"""Makes the state to load a checkpoint into. It is given the checkpoint's state, with a Described for each tensor."""

Ranks = Callable[[int], Collection[int]]
"""Whose own state to read, of the ranks that saved. It is given their number."""

_JSON = TypeAdapter[codec.Json](codec.Json)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint that was read.

    Attributes:
        state: The state that was made for the checkpoint, filled in.
        rank_state: What this rank saved. None at a different world size, because no rank is the same there.
        rank_states: What each of the ranks that saved has saved, in order of rank, as it is encoded.
        rank_tensors: The tensors in those states that were to be read, by name.
        replaced: Frozen weights for which the script brought other values than the checkpoint holds.
    """

    step: int
    state: dict[str, Any]
    extra: dict[str, Any]
    rank_state: dict[str, Any] | None
    rank_states: tuple[codec.Json, ...] = ()
    rank_tensors: codec.Tensors = field(default_factory=dict)
    replaced: tuple[str, ...] = ()


def own_alone(_: int) -> Collection[int]:
    """No other rank's state."""
    return ()


class Loader:
    """One rank's reads. Its methods are collectives, except `open`."""

    def __init__(
        self,
        storage: CheckpointStorage,
        collectives: Collectives,
        frozen: FrozenWeights,
        *,
        rank: int,
        world_size: int,
    ) -> None:
        self._storage = storage
        self._collectives = collectives
        self._frozen = frozen
        self._rank = rank
        self._world_size = world_size

    def newest_whole(self, commits: tuple[Commit, ...]) -> Commit | None:
        """The first of `commits` (newest first) that is whole. Reads all its bytes. None if `commits` is empty.

        Raises:
            CorruptCheckpoint: None of them is whole.
            CheckpointError: The store doesn't let the ranks read the bytes.
        """
        for candidate in commits:
            damage = self._collectives.first_error(partial(self._verify, candidate))
            if damage is None:
                return candidate
            if not isinstance(damage, CorruptCheckpoint):
                raise damage  # a store that doesn't answer says nothing about the commit
            logger.warning("The checkpoint at step %d is passed over. %s", candidate.step, damage)
        if commits:
            raise CorruptCheckpoint(
                f"None of the {len(commits)} kept checkpoints is whole; the pod's log says what each lacks. "
                "Restore the bucket's objects, or create a new job with a different checkpoint.uri."
            )
        return None

    def newest_extra(self) -> dict[str, Any]:
        """The `extra` of the newest commit with a whole manifest.

        It is the same on all ranks. Empty if there is none.
        """
        extra: dict[str, Any] = codec.decode(self._collectives.from_rank_0(self._newest_extra, _JSON))
        return extra

    def open(self, commit: Commit) -> tuple[Manifest, PartReader]:
        """The manifest of a commit, and a reader of its data. Raises CorruptCheckpoint or CheckpointMismatch."""
        manifest = read_manifest(self._storage, commit)
        return manifest, PartReader(self._storage, commit.attempt, manifest)

    def load(
        self, room: Room, frozen: Collection[str], ranks: Ranks, read: Callable[[], tuple[Manifest, PartReader]]
    ) -> Loaded:
        """Fill what `room` makes from the checkpoint that `read` opens. If any rank fails, all raise."""
        tensors: codec.Tensors = {}

        def work() -> tuple[Manifest, dict[str, Any], codec.Tensors]:
            manifest, parts = read()
            state = room(described(manifest))
            tensors.update(codec.split(state)[0])
            self._frozen.before_load(tensors, frozen, manifest)
            state.update(filled(state, tensors, manifest, parts))
            own = [self._rank] if manifest.world_size == self._world_size else []
            states = [manifest.rank_states[number] for number in {*ranks(manifest.world_size), *own}]
            return manifest, state, tensors_of(states, manifest, parts)

        manifest, state, rank_tensors = self._collectives.together(work)
        replaced = self._collectives.union(self._frozen.loaded(tensors, frozen, manifest))
        same_world = manifest.world_size == self._world_size
        return Loaded(
            step=manifest.step,
            state=state,
            extra=codec.decode(manifest.extra),
            rank_state=codec.join(manifest.rank_states[self._rank], rank_tensors) if same_world else None,
            rank_states=manifest.rank_states,
            rank_tensors=rank_tensors,
            replaced=tuple(sorted(replaced)),
        )

    def _newest_extra(self) -> codec.Json:
        head = read_head(self._storage)
        for commit in head.commits if head is not None else ():
            try:
                extra = read_manifest(self._storage, commit).extra
                codec.decode(extra)
            except CorruptCheckpoint as error:
                logger.warning("The checkpoint at step %d is passed over. %s", commit.step, error)
            else:
                return extra
        return {}

    def _verify(self, commit: Commit) -> None:
        """Read this rank's share of the files of a commit."""
        manifest, parts = self.open(commit)
        for number in range(self._rank, manifest.num_files, self._world_size):
            parts.verify(number)
