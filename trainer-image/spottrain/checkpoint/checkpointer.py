"""Saving and loading for the training loop."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from spottrain.checkpoint.background import Background
from spottrain.checkpoint.collectives import Collectives, attempt
from spottrain.checkpoint.errors import CheckpointError, CorruptCheckpoint, SaveFailed
from spottrain.checkpoint.fill import fill
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.format.attempt import Attempt
from spottrain.checkpoint.format.commits import Commit
from spottrain.checkpoint.format.dcp import RankPlan, plan_save, signature
from spottrain.checkpoint.format.head import fence, read_head
from spottrain.checkpoint.format.manifest import Manifest, Receipt, read_manifest
from spottrain.checkpoint.format.part_reader import PartReader
from spottrain.checkpoint.peers.replicas import Replicas
from spottrain.checkpoint.saving.frozen import FrozenWeights
from spottrain.checkpoint.saving.parts import AgreedParts, Parts
from spottrain.checkpoint.saving.persist import Persist, SaveHandle
from spottrain.checkpoint.saving.retention import CleanUp, Retention, clean_up
from spottrain.checkpoint.saving.staging import StagingBuffer
from spottrain.checkpoint.saving.upload import Upload
from spottrain.checkpoint.saving.writer import WriterProcess
from spottrain.checkpoint.stores.storage import CheckpointStorage
from spottrain_api.contract import MemoryCheckpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a checkpoint holds besides the state that was filled in."""

    step: int
    extra: dict[str, Any]
    rank_state: dict[str, Any] | None
    """What this rank saved; None at another world size, where no rank is the same."""
    replaced: tuple[str, ...] = ()
    """Frozen weights that the script brought with other values than the checkpoint has."""


class Checkpointer:
    """One rank's access to a job's checkpoints.

    `latest`, `load`, `save`, `save_in_background`, `prepare`, `settle` and `share_failures` are collectives: every
    rank calls them, in the same order, from the training thread. They use `process_group` only, a gloo group that
    nothing else uses, so that they never meet a collective of the model. What runs in the background uses no
    collective at all.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        *,
        generation: int,
        attempt_id: str,
        rank: int,
        world_size: int,
        process_group: dist.ProcessGroup | None = None,
        retention: Retention | None = None,
        receipts_timeout_seconds: float = 600.0,
        writer: WriterProcess | None = None,
    ) -> None:
        """`attempt_id` names this start of the generation and is part of the prefix of all its attempts.
        With `retention`, each commit made in the background is followed by a clean-up. `writer`, connected to the
        same store, uploads the data; without one, threads of this process do."""
        if world_size > 1 and process_group is None:
            raise ValueError("a world of more than one rank needs a gloo process group of its own")
        self._storage = storage
        self._generation = generation
        self._attempt_id = attempt_id
        self._rank = rank
        self._world_size = world_size
        self._group = process_group if world_size > 1 else None
        self._collectives = Collectives(self._group, rank)
        self._clean_up = CleanUp(storage, generation, retention) if retention is not None and rank == 0 else None
        self._receipts_timeout_seconds = receipts_timeout_seconds
        self._staging = StagingBuffer()
        self._frozen = FrozenWeights(self._collectives, rank=rank, world_size=world_size, group=self._group)
        self._upload = Upload(storage, writer, rank=rank)
        self._background = Background("checkpoint")
        self._plan: tuple[RankPlan, tuple[Any, ...]] | None = None
        self._current: SaveHandle | None = None
        self._resumed_from_step: int | None = None
        self.has_rebuilt_head = False
        """Whether HEAD was missing or damaged when `latest` asked, so that it was made anew."""

    def latest(self, *, verify: bool = False) -> Commit | None:
        """The newest commit, the same on all ranks; None where there is none. Fences older generations.

        With `verify`, all its bytes are read first, and a damaged commit is passed over, with a warning,
        for the newest kept one that is whole. Raises Fenced, and what keeps the bytes from being read.
        """
        head = self._collectives.from_rank_0(lambda: fence(self._storage, self._generation))
        self.has_rebuilt_head = self.has_rebuilt_head or head.rebuilt
        if not verify:
            return head.newest
        for candidate in head.commits:
            damage = self._collectives.first_error(partial(self._verify, candidate))
            if damage is None:
                return candidate
            if not isinstance(damage, CorruptCheckpoint):
                raise damage  # a store that doesn't answer says nothing about the commit
            logger.warning("The checkpoint at step %d is passed over. %s", candidate.step, damage)
        if head.commits:
            raise CorruptCheckpoint(
                f"None of the {len(head.commits)} kept checkpoints is whole; see the warnings above. Restore "
                "the bucket's objects, or start afresh with another checkpoint.uri."
            )
        return None

    def newest_extra(self) -> dict[str, Any]:
        """The `extra` of the newest commit whose manifest is whole, the same on all ranks; empty where there is
        none."""
        return self._collectives.from_rank_0(self._newest_extra)

    def load(self, state: dict[str, Any], commit: Commit, *, frozen: Collection[str] = ()) -> Loaded:
        """Fill the tensors of `state` in place, and replace its other values by the stored ones. `frozen` are the
        names of tensors that aren't trained, as `codec.split` gives them.

        What is read is verified before it reaches a tensor. When any rank fails, all raise: CorruptCheckpoint
        (`latest(verify=True)` finds an older commit that is whole) or CheckpointMismatch, which leaves
        `state` as it was.
        """

        def read() -> tuple[Manifest, PartReader]:
            manifest = read_manifest(self._storage, commit)
            return manifest, PartReader(self._storage, commit.attempt, manifest)

        loaded = self._load(state, frozen, read)
        self._resumed_from_step = commit.step
        return loaded

    def load_replica(
        self,
        state: dict[str, Any],
        replicas: Replicas,
        checkpoint: MemoryCheckpoint,
        *,
        frozen: Collection[str] = (),
    ) -> Loaded:
        """As `load`, from members' memory. HEAD doesn't know this step yet: save it first of all."""
        found = replicas.read(checkpoint)
        return self._load(state, frozen, lambda: found)

    def prepare(self, state: dict[str, Any], *, frozen: Collection[str] = ()) -> None:
        """Plan and allocate ahead for states of this structure, so that the first save is not slow. Connecting to the
        store goes on in the background."""
        tensors, _ = self._collectives.together(lambda: codec.split(state))
        own, once = self._frozen.split(tensors, frozen)
        (changed, unwritten), _ = self._collectives.any_and_token(self._is_new(own), self._frozen.is_unwritten(once))
        # A save that is under way may be the one that writes them.
        if unwritten and self._current is None and (new := self._frozen.agree(once)):
            self._frozen.prepare(new)
        self._staging.prepare(self._planned(own, changed))
        memory = self._staging.memory
        self._background.submit(lambda: self._upload.connect(memory))

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        frozen: Collection[str] = (),
        extra: dict[str, Any] | None = None,
        rank_state: dict[str, Any] | None = None,
        deadline_seconds: float | None = None,
    ) -> SaveHandle:
        """Save `state` after `step` steps, and return when HEAD names this step, with `commit` set on every rank.
        Raises CheckpointError, on every rank, if that failed.

        A save in the background is waited for first; a step that it has committed is not saved again. `frozen` are
        the names of tensors that aren't trained, as `codec.split` gives them: they are written once, and again only
        if they have changed. `extra` and `state` but for its sharded tensors are rank 0's; `rank_state` is each
        rank's own. `deadline_seconds` bounds the wait for the other ranks' receipts.
        """
        started = time.monotonic()
        self.settle(deadline_seconds)
        agreed = self._meet(state, frozen, extra, rank_state, is_wanted=lambda: self._is_unsaved(step))
        if agreed.is_busy:
            raise SaveFailed(
                f"Step {step} was not committed: the save before was still under way after {deadline_seconds} s."
            )
        if not agreed.is_wanted and self._current is not None:
            return self._committed(self._current)
        task = self._stage(agreed, step, frozen, started=started, receipts_timeout_seconds=deadline_seconds)
        if self._group is None:
            task.run()  # there is nobody to be heard meanwhile
        else:
            self._background.submit(task.run)
        self.share_failures(deadline_seconds)
        return self._committed(task.handle)

    def save_in_background(
        self,
        state: dict[str, Any],
        *,
        step: int,
        frozen: Collection[str] = (),
        extra: dict[str, Any] | None = None,
        rank_state: dict[str, Any] | None = None,
    ) -> SaveHandle | None:
        """As `save`, but return once the state is staged. None, on all ranks, while the save before is under way on
        one of them."""
        started = time.monotonic()
        agreed = self._meet(state, frozen, extra, rank_state, is_wanted=lambda: True)
        if agreed.is_busy:
            return None
        task = self._stage(agreed, step, frozen, started=started, is_followed_by_clean_up=True)
        self._background.submit(task.run)
        return task.handle

    def clean_up(self, retention: Retention) -> int:
        """On rank 0: forget and delete the commits that `retention` does not keep, and abandoned attempts; the number
        of objects deleted.

        Never what HEAD names, nor what a generation that may still commit has written. No collective.
        """
        return clean_up(self._storage, self._generation, retention) if self._rank == 0 else 0

    @property
    def has_failed(self) -> bool:
        """Whether this rank's part of the newest save has failed, and the others haven't heard of it yet."""
        current = self._current
        return self._rank != 0 and current is not None and current.error is not None and current.given_up is None

    def share_failures(self, timeout_seconds: float | None = 0.0) -> None:
        """Let rank 0 give up the newest save where another rank's part of it has failed: that rank may not reach the
        store, not even to say so there. Waits, so long, for the parts of all ranks but rank 0's. A collective."""
        handle = self._current
        if handle is None:
            return
        if self._rank != 0:
            handle.join(timeout_seconds)
        if (error := self._collectives.first_error(self._raise_failure)) is not None:
            handle.give_up(error)

    def settle(self, timeout_seconds: float | None = None) -> None:
        """Wait until the save under way has ended, well or not, or the time is over. Its error, if any, stays on its
        handle. A collective."""
        if self._current is not None:
            started = time.monotonic()
            self.share_failures(timeout_seconds)
            waited = time.monotonic() - started
            self._current.join(None if timeout_seconds is None else max(0.0, timeout_seconds - waited))

    def _raise_failure(self) -> None:
        handle = self._current
        if self._rank != 0 and handle is not None and handle.error is not None:
            raise SaveFailed(
                f"The checkpoint at step {handle.step} was given up, as rank {self._rank} failed: {handle.error}"
            )

    def _is_busy(self) -> bool:
        return self._current is not None and not self._current.done

    def _meet(
        self,
        state: dict[str, Any],
        frozen: Collection[str],
        extra: dict[str, Any] | None,
        rank_state: dict[str, Any] | None,
        *,
        is_wanted: Callable[[], bool],
    ) -> AgreedParts:
        parts = attempt(lambda: Parts.of(state, extra, rank_state))
        failed = isinstance(parts, CheckpointError)
        own, once = self._frozen.split({} if isinstance(parts, CheckpointError) else parts.tensors, frozen)
        # The ranks finish their parts at different times, so only together they know how it stands. One question is
        # all that they ask each other, and before they copy: a rank that has copied begins to write, and on busy
        # processors that slows the copy of the others.
        (failed, busy, wanted, changed, unwritten), unique = self._collectives.any_and_token(
            failed,
            self._is_busy(),
            is_wanted(),
            failed or self._is_new(own),
            self._frozen.is_unwritten(once),
        )
        parts = self._collectives.settled(parts, failed)
        return AgreedParts(parts, own, once, busy, wanted, changed, unwritten, unique)

    def _stage(
        self,
        agreed: AgreedParts,
        step: int,
        frozen: Collection[str],
        *,
        started: float,
        receipts_timeout_seconds: float | None = None,
        is_followed_by_clean_up: bool = False,
    ) -> Persist:
        """Copy what is to be written, and make it the save under way."""
        parts, own, once, changed = agreed.parts, agreed.own, agreed.once, agreed.has_changed
        new: codec.Tensors = {}
        if agreed.has_unwritten:  # rarely, so that the ranks may ask each other once more
            new, before = self._frozen.agree(once), len(own)
            own, once = self._frozen.split(parts.tensors, frozen)
            changed = changed or len(own) != before
        plan = self._planned(own, changed)
        frozen_part = self._frozen.stage(once, new)
        staged = self._staging.stage(plan, own)
        self._current = handle = SaveHandle(
            step,
            plan.size + frozen_part.size,
            time.monotonic() - started,
            writes_frozen_weights=bool(new),
        )
        self._frozen.saving(handle)
        begin_clean_up = self._clean_up.begin if self._clean_up is not None else None
        return Persist(
            storage=self._storage,
            attempt=Attempt.new(self._generation, step, f"{self._attempt_id}-{agreed.unique:016x}"),
            handle=handle,
            write=partial(self._upload.write, staged),
            write_frozen=partial(self._upload.write, frozen_part.staged) if frozen_part.staged is not None else None,
            receipt=Receipt(
                rank=self._rank,
                world_size=self._world_size,
                entries=plan.entries,
                frozen_entries=frozen_part.entries,
                rank_state=parts.rank_state,
            ),
            shared=frozen_part.kept,
            tree=parts.tree,
            extra=parts.extra,
            resumed_from_step=self._resumed_from_step,
            receipts_timeout_seconds=receipts_timeout_seconds or self._receipts_timeout_seconds,
            clean_up=begin_clean_up if is_followed_by_clean_up else None,
            make_room=begin_clean_up,
        )

    def _is_unsaved(self, step: int) -> bool:
        """Whether to save this step, as rank 0 sees it, the others being none the wiser: what it has committed is
        committed, also where another rank's answer from the store was lost."""
        if self._rank != 0:
            return False
        current = self._current
        if current is None or not current.done or current.step != step:
            return True
        return current.error is not None and not self._was_committed(current)

    def _was_committed(self, failed: SaveHandle) -> bool:
        """Whether HEAD names what the store gave no answer on; then it is a commit like any other."""
        with contextlib.suppress(CheckpointError):
            head = read_head(self._storage) if failed.begun is not None else None
            if head is not None and failed.begun in head.commits:
                failed.commit, failed.error = failed.begun, None
        return failed.error is None

    def _committed(self, handle: SaveHandle) -> SaveHandle:
        """What the save ended with on rank 0 holds for all ranks."""
        handle.commit, handle.error = self._collectives.from_rank_0(handle.wait), None
        return handle

    def _is_new(self, tensors: codec.Tensors) -> bool:
        return self._plan is None or self._plan[1] != signature(tensors)

    def _planned(self, tensors: codec.Tensors, changed: bool) -> RankPlan:
        if changed or self._plan is None:
            self._plan = plan_save(tensors, rank=self._rank, group=self._group), signature(tensors)
        return self._plan[0]

    def _load(
        self, state: dict[str, Any], frozen: Collection[str], read: Callable[[], tuple[Manifest, PartReader]]
    ) -> Loaded:
        tensors: codec.Tensors = {}

        def work() -> Manifest:
            manifest, parts = read()
            tensors.update(codec.split(state)[0])
            self._frozen.before_load(tensors, frozen, manifest)
            fill(state, tensors, manifest, parts)
            return manifest

        manifest = self._collectives.together(work)
        replaced = self._collectives.union(self._frozen.loaded(tensors, frozen, manifest))
        same_world = manifest.world_size == self._world_size
        return Loaded(
            step=manifest.step,
            extra=codec.join(manifest.extra, {}),
            rank_state=codec.join(manifest.rank_states[self._rank], {}) if same_world else None,
            replaced=tuple(sorted(replaced)),
        )

    def _newest_extra(self) -> dict[str, Any]:
        head = read_head(self._storage)
        for commit in head.commits if head is not None else ():
            try:
                extra: dict[str, Any] = codec.join(read_manifest(self._storage, commit).extra, {})
            except CorruptCheckpoint as error:
                logger.warning("The checkpoint at step %d is passed over. %s", commit.step, error)
            else:
                return extra
        return {}

    def _verify(self, commit: Commit) -> None:
        """This rank's share of reading all the files of a commit."""
        manifest = read_manifest(self._storage, commit)
        parts = PartReader(self._storage, commit.attempt, manifest)
        for number in range(self._rank, manifest.num_files, self._world_size):
            parts.verify(number)
