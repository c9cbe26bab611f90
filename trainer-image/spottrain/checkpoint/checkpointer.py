"""Saving and loading for the training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch.distributed as dist
from pydantic import TypeAdapter

from spottrain.checkpoint.background import BackgroundThread
from spottrain.checkpoint.collectives import Collectives, result_or_error
from spottrain.checkpoint.errors import SaveFailed
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.format.attempt import Attempt
from spottrain.checkpoint.format.commits import Commit, Head
from spottrain.checkpoint.format.head import fence
from spottrain.checkpoint.format.manifest import Receipt
from spottrain.checkpoint.loading.loader import Loaded, Loader, Ranks, Room, own_alone
from spottrain.checkpoint.peers.replicas import Replicas
from spottrain.checkpoint.saving.alike import Alike, Path
from spottrain.checkpoint.saving.committer import Committer
from spottrain.checkpoint.saving.comparison import Comparison
from spottrain.checkpoint.saving.frozen import FrozenWeights
from spottrain.checkpoint.saving.known_plan import KnownPlan
from spottrain.checkpoint.saving.parts import Agreement, Parts, StagedPart
from spottrain.checkpoint.saving.retention import Retention
from spottrain.checkpoint.saving.save_handle import SaveHandle, was_committed
from spottrain.checkpoint.saving.save_task import SaveTask
from spottrain.checkpoint.saving.staging import StagingBuffer
from spottrain.checkpoint.saving.trial import Trial
from spottrain.checkpoint.saving.upload import Upload
from spottrain.checkpoint.saving.writer import WriterProcess
from spottrain.checkpoint.stores.storage import CheckpointStorage
from spottrain_api.contract.replicas import ReplicatedStep
from spottrain_planner.memory_estimate import PIECE_BYTES

_HEAD, _COMMIT = TypeAdapter(Head), TypeAdapter[Commit | None](Commit | None)


class Checkpointer:
    """One rank's access to a job's checkpoints.

    `latest`, `newest_extra`, `load`, `load_replica`, `save`, `save_in_background`, `prepare`, `settle` and
    `share_failures` are collectives: every rank calls them, in the same order, from the training thread. They use
    `process_group` alone, a gloo group that nothing else uses, so that they never mix with a collective of the model.
    Work in the background uses no collective at all.
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
        free_bytes: Callable[[], float] = lambda: math.inf,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """Open one rank's access. Call it on every rank.

        Args:
            storage: The store of the job's checkpoints.
            generation: Number of the generation that this rank belongs to.
            attempt_id: Names this start of the generation. It is part of the prefix of every save.
            rank: This rank.
            world_size: Number of ranks.
            process_group: A gloo group that nothing else uses. A world of one needs none.
            retention: Which commits a clean-up in the background keeps. It follows each commit that is made in the
                background. None: no such clean-up.
            receipts_timeout_seconds: How long rank 0 waits for the receipts of the other ranks.
            writer: The process that uploads the data, connected to the same store. None: threads of this process
                upload it.
            free_bytes: How much of the node's memory this rank may stage in. What doesn't fit is staged in pieces.
            piece_bytes: Size of these pieces.
        """
        if world_size > 1 and process_group is None:
            raise ValueError("a world of more than one rank needs a gloo process group of its own")
        self._storage = storage
        self._generation = generation
        self._attempt_id = attempt_id
        self._rank = rank
        self._world_size = world_size
        self._group = process_group if world_size > 1 else None
        self._collectives = Collectives(self._group, rank)
        self._committer = Committer(storage, generation, retention) if rank == 0 else None
        self._receipts_timeout_seconds = receipts_timeout_seconds
        self._free_bytes, self._room = free_bytes, math.inf
        self._staging = StagingBuffer(piece_bytes)
        self._frozen = FrozenWeights(
            self._collectives, rank=rank, world_size=world_size, group=self._group, piece_bytes=piece_bytes
        )
        self._loader = Loader(storage, self._collectives, self._frozen, rank=rank, world_size=world_size)
        self._upload = Upload(storage, writer, rank=rank)
        self._background = BackgroundThread("checkpoint")
        self._plan = KnownPlan(rank=rank, group=self._group)
        self._comparison = Comparison(self._collectives, self._plan, self._frozen, self._group)
        self._trial = Trial()
        self._current: SaveHandle | None = None
        self.has_rebuilt_head = False
        """Whether `latest` found HEAD missing or damaged, so that it was rebuilt."""

    def latest(self, *, verify: bool = False, before_first: Callable[[], None] = lambda: None) -> Commit | None:
        """Return the newest commit, the same on all ranks, and fence older generations.

        Args:
            verify: Read all bytes of the commit first. A damaged commit is passed over, with a warning, for the
                newest kept one that is whole.
            before_first: Called on rank 0 before the first write to a store that holds nothing yet. It may raise.

        Returns:
            The commit, or None if there is none.

        Raises:
            Fenced: A newer generation has taken over.
            CorruptCheckpoint: HEAD is damaged beyond repair or, with `verify`, no kept commit is whole.
            StorageError: The store can't be read.
        """
        head = self._collectives.from_rank_0(
            lambda: fence(self._storage, self._generation, before_first=before_first), _HEAD
        )
        self.has_rebuilt_head = self.has_rebuilt_head or head.rebuilt
        return self._loader.newest_whole(head.commits) if verify else head.newest

    def newest_extra(self) -> dict[str, Any]:
        """The `extra` of the newest commit with a whole manifest; {} without one. It is the same on all ranks."""
        return self._loader.newest_extra()

    def load(self, room: Room, commit: Commit, *, frozen: Collection[str] = (), ranks: Ranks = own_alone) -> Loaded:
        """Read a checkpoint into the tensors that `room` makes.

        Bytes are verified before they reach a tensor. If any rank fails, all ranks raise.

        Args:
            room: Makes the state to fill. Its tensors are those of the checkpoint by name, type and shape, whole or
                in shards; other values don't count.
            commit: What to read.
            frozen: Names of tensors that aren't trained, as `codec.split` returns them.
            ranks: Whose own state is needed besides what this rank has saved.

        Returns:
            The checkpoint, with the tensors of `room` in its state.

        Raises:
            CorruptCheckpoint: Bytes are damaged. `latest(verify=True)` finds an older commit that is whole.
            CheckpointMismatch: The checkpoint doesn't fit what `room` makes, which stays as it was.
            StorageError: The store can't be read.
        """
        loaded = self._loader.load(room, frozen, ranks, lambda: self._loader.open(commit))
        if self._committer is not None:
            self._committer.resumed_from_step = commit.step
        return loaded

    def load_replica(
        self,
        room: Room,
        replicas: Replicas,
        checkpoint: ReplicatedStep,
        *,
        frozen: Collection[str] = (),
        ranks: Ranks = own_alone,
    ) -> Loaded:
        """Load as `load` does, from members' memory. HEAD doesn't name this step yet: save it first of all."""
        found = replicas.read(checkpoint)
        return self._loader.load(room, frozen, ranks, lambda: found)

    def prepare(
        self,
        state: dict[str, Any],
        *,
        frozen: Collection[str] = (),
        extra: dict[str, Any] | None = None,
        alike: Collection[Path] = (),
        trial: Callable[[], None] = lambda: None,
    ) -> None:
        """Plan and allocate ahead for states of this structure.

        So the first save is not slow. The connection to the store is opened in the background. Raises
        UnsupportedState or RanksDiffer, as the save would; here also for frozen weights that differ, and what
        `trial` raises on any rank.
        """

        def work() -> Parts:
            parts = Parts.of(state, frozen, extra, None, alike, self._frozen, self._rank)
            trial()
            return parts

        room = self._free_bytes()  # before any rank of this node allocates, as ranks wait for each other below
        parts = self._collectives.together(work)
        every = Alike.of(parts.tensors, parts.tree, parts.extra, alike)
        outdated, unwritten = self._comparison.ahead(parts, every)
        # The save under way may be the one that writes them.
        if unwritten and self._current is None and (new := self._frozen.agree(parts.frozen)):
            room -= self._frozen.prepare(new, room)
        self._staging.prepare(self._plan.of(parts.trained, outdated=outdated), room)
        memory = self._staging.memory
        self._background.submit(lambda: self._upload.connect(memory))

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        frozen: Collection[str] = (),
        extra: dict[str, Any] | None = None,
        alike: Collection[Path] = (),
        rank_state: dict[str, Any] | None = None,
        deadline_seconds: float | None = None,
    ) -> SaveHandle:
        """Save `state` after `step` steps, and return when HEAD names this step.

        It waits for a save in the background first. If that one has committed this step, it saves nothing.

        Args:
            state: What to save. Sharded tensors come from every rank, everything else from rank 0.
            step: Number of steps that the state has seen.
            frozen: Names of tensors that aren't trained, as `codec.split` returns them. They are written once, and
                again only if they have changed.
            extra: Plain values that are stored beside the state, from rank 0.
            alike: Where `extra` has values that are the same on all ranks. Others are rank 0's alone.
            rank_state: Plain values of each rank's own.
            deadline_seconds: Limit of the waits for the previous save and for the other ranks' receipts.

        Returns:
            The save, with `commit` set on every rank.

        Raises:
            RanksDiffer: On every rank: they differ in what the commit would hold once. Nothing is saved.
            CheckpointError: On every rank: the save failed, or the state can't be stored.
        """
        started = time.monotonic()
        self.settle(deadline_seconds)
        parts, agreement = self._agree(state, frozen, extra, rank_state, alike, unless_saved=step)
        if agreement.is_busy:
            raise SaveFailed(
                f"Step {step} was not committed: the previous save was still under way after {deadline_seconds} s."
            )
        if not agreement.is_wanted and self._current is not None:
            return self._committed(self._current)
        task = self._stage(parts, agreement, step, started=started, receipts_timeout_seconds=deadline_seconds)
        try:
            if self._group is None:
                task.run()  # no other rank can report a failure meanwhile
            else:
                self._background.submit(task.run)
            self.share_failures(deadline_seconds)
            return self._committed(task.handle)
        finally:
            task.part.close()

    def save_in_background(
        self,
        state: dict[str, Any],
        *,
        step: int,
        frozen: Collection[str] = (),
        extra: dict[str, Any] | None = None,
        alike: Collection[Path] = (),
        rank_state: dict[str, Any] | None = None,
    ) -> SaveHandle | None:
        """Stage `state` after `step` steps, and save it in the background.

        If it is staged in pieces, this returns when the rank's data is stored.

        Args:
            state: As for `save`, as are the other arguments.
            step: Number of steps that the state has seen.
            frozen: Names of tensors that aren't trained.
            extra: Plain values that are stored beside the state.
            alike: Where `extra` has values that are the same on all ranks.
            rank_state: Plain values of each rank's own.

        Returns:
            The save, or None, on all ranks, if the previous save is still under way on one of them.

        Raises:
            RanksDiffer: On every rank: they differ in what the commit would hold once.
            CheckpointError: On every rank: the state can't be stored.
        """
        started = time.monotonic()
        parts, agreement = self._agree(state, frozen, extra, rank_state, alike)
        if agreement.is_busy:
            return None
        task = self._stage(parts, agreement, step, started=started, is_in_background=True)
        self._background.submit(task.run)
        if task.part.is_in_pieces:
            try:
                task.handle.join_storing()
            finally:
                task.part.close()
        return task.handle

    @property
    def pieces_of(self) -> int | None:
        """How many bytes this rank stages in pieces, without room for all at once. None: there is room."""
        return self._staging.size if self._staging.is_in_pieces else None

    def clean_up_in_background(self) -> None:
        """On rank 0, start a clean-up that keeps `retention`, and return at once.

        Not a collective. After a resume, it does what the commits of drains don't wait for.
        """
        if self._committer is not None:
            self._committer.start_clean_up()

    @property
    def clean_up_failure(self) -> str | None:
        """Why old commits are not deleted, on rank 0, once several clean-ups in a row have failed."""
        return self._committer.clean_up_failure if self._committer is not None else None

    def clean_up(self, retention: Retention, *, seconds: float = math.inf) -> int:
        """On rank 0, drop and delete older commits and abandoned attempts. Not a collective.

        It never deletes what HEAD names, nor what a generation has written that may still commit.

        Args:
            retention: Which commits to keep.
            seconds: After how long to stop deleting. The next clean-up finds what is left.

        Returns:
            The number of objects that were deleted.
        """
        return self._committer.clean_up(retention, seconds) if self._committer is not None else 0

    @property
    def has_failed(self) -> bool:
        """Whether this rank's part of the newest save has failed.

        True only while the other ranks don't know it yet.
        """
        current = self._current
        return self._rank != 0 and current is not None and current.error is not None and current.given_up is None

    def share_failures(self, timeout_seconds: float | None = 0.0) -> None:
        """Make rank 0 give up the newest save if another rank's part of it has failed. A collective.

        That rank may not reach the store, not even to report its failure there.

        Args:
            timeout_seconds: How long to wait for the parts of all ranks except rank 0. None: without a limit.
        """
        handle = self._current
        if handle is None:
            return
        if self._rank != 0:
            handle.join(timeout_seconds)
        if (error := self._collectives.first_error(partial(handle.raise_failure, self._rank))) is not None:
            handle.give_up(error)

    def settle(self, timeout_seconds: float | None = None) -> None:
        """Wait until the save under way has ended, or the time is over. A collective.

        If the save fails, its handle keeps the error.

        Args:
            timeout_seconds: How long to wait. None: without a limit.
        """
        if self._current is not None:
            started = time.monotonic()
            self.share_failures(timeout_seconds)
            waited = time.monotonic() - started
            self._current.join(None if timeout_seconds is None else max(0.0, timeout_seconds - waited))

    def _agree(
        self,
        state: dict[str, Any],
        frozen: Collection[str],
        extra: dict[str, Any] | None,
        rank_state: dict[str, Any] | None,
        alike: Collection[Path],
        *,
        unless_saved: int | None = None,
    ) -> tuple[Parts, Agreement]:
        """Split the state, and agree with all ranks on what to do about it. A collective.

        If the step `unless_saved` is committed already, the save is not wanted.
        """
        self._room = self._free_bytes()  # before any rank of this node allocates, as ranks wait for each other below
        found = result_or_error(
            lambda: (
                Parts.of(state, frozen, extra, rank_state, alike, self._frozen, self._rank),
                self._is_unsaved(unless_saved),
            )
        )
        is_busy = self._current is not None and not self._current.done
        return self._comparison.of_save(found, is_busy=is_busy)

    def _stage(
        self,
        parts: Parts,
        agreement: Agreement,
        step: int,
        *,
        started: float,
        receipts_timeout_seconds: float | None = None,
        is_in_background: bool = False,
    ) -> SaveTask:
        """Copy what is to be written, and make it the save under way."""
        trained, once, outdated = parts.trained, parts.frozen, agreement.is_outdated
        new: codec.Tensors = {}
        if agreement.has_unwritten:  # rare enough for one more exchange between the ranks
            new = self._frozen.agree(once)
            trained, once = self._frozen.split(parts.tensors, once)
            outdated = outdated or len(trained) != len(parts.trained)
        plan = self._plan.of(trained, outdated=outdated)
        frozen_part = self._frozen.stage(once, new, self._room)
        staged = self._staging.stage_within(self._room - frozen_part.memory_bytes, plan, trained)
        self._current = handle = SaveHandle(
            step,
            plan.size + frozen_part.size,
            time.monotonic() - started,
            writes_frozen_weights=bool(new),
        )
        self._frozen.saving(handle)
        receipt = Receipt(
            rank=self._rank,
            world_size=self._world_size,
            entries=plan.entries,
            frozen_entries=frozen_part.entries,
            rank_state=parts.rank_state,
        )
        return SaveTask(
            attempt=Attempt.new(self._generation, step, f"{self._attempt_id}-{agreement.token:016x}"),
            handle=handle,
            part=StagedPart(
                receipt=receipt,
                data=staged,
                frozen=frozen_part,
                tree=parts.tree,
                extra=parts.extra,
                is_tried=is_in_background and self._trial.is_due(plan, handle),
            ),
            upload=self._upload,
            committer=self._committer,
            receipts_timeout_seconds=receipts_timeout_seconds or self._receipts_timeout_seconds,
            is_followed_by_clean_up=is_in_background,
        )

    def _is_unsaved(self, step: int | None) -> bool:
        """Whether to save this step, as rank 0 sees it: the other ranks don't know.

        None: any step. What rank 0 has committed stays committed, even if the store's answer to another rank was
        lost. Raises CheckpointError if HEAD may name this step, and can't be read.
        """
        if self._rank != 0:
            return False
        current = self._current
        if current is None or not current.done or current.step != step:
            return True
        return current.error is not None and not was_committed(self._storage, current)

    def _committed(self, handle: SaveHandle) -> SaveHandle:
        """Set the result of rank 0 on all ranks."""
        handle.commit, handle.error = self._collectives.from_rank_0(handle.wait, _COMMIT), None
        return handle
