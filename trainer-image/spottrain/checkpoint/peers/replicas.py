"""Replicas: each rank's shard in the memory of members.

One copy is in the memory of its own member, and one in that of a peer on a different node. After the loss of a node,
training repeats a few steps at most, and reads nothing from the store. A replicated step is not a commit: the
operator learns from the members' reports which step they hold for all ranks. A generation that resumes from such a
step commits it to the store first, so that HEAD stays the truth.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from spottrain.checkpoint.background import BackgroundThread
from spottrain.checkpoint.collectives import Collectives
from spottrain.checkpoint.errors import CheckpointError, CorruptCheckpoint, ObjectNotFound
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.format.manifest import (
    DataFile,
    Manifest,
    Receipt,
    block_checksums,
    build_manifest,
    data_key,
    receipt_key,
    serialise,
)
from spottrain.checkpoint.format.part_reader import PartReader
from spottrain.checkpoint.peers.replica_client import ReplicaClient, ReplicaReader, prefix, state_key
from spottrain.checkpoint.saving.known_plan import KnownPlan
from spottrain.checkpoint.saving.staging import StagingBuffer
from spottrain.checkpoint.stores.storage import Buffer
from spottrain_api.contract.replicas import HeldShards, ReplicaSettings, ReplicatedStep

logger = logging.getLogger(__name__)

# Cost of replicas as a share of a step's time, if the job doesn't say how often to replicate. A step may take 2%
# longer in total. Half of that is kept for the sends of the other ranks, which delay this rank at different moments.
COST_SHARE = 0.01
_SMOOTHING = 0.5


class Replicas:
    """One rank's access to peers' memory.

    `replicate` and `read` are collectives on `group`. The training thread calls them. Work in the background uses no
    collective.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        *,
        generation: int,
        rank: int,
        world_size: int,
        ranks_per_node: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._settings = settings
        self._members = [
            ReplicaClient(address, settings.token) for address in (settings.own, settings.peer) if address
        ]
        self._generation = generation
        self._rank = rank
        self._world_size = world_size
        # Seconds of the whole node, if each of its ranks spends one second of processor time.
        self._processor_share = ranks_per_node / (os.cpu_count() or 1)
        self._group = group if world_size > 1 else None
        self._collectives = Collectives(self._group, rank)
        self._staging = StagingBuffer()
        self._plan = KnownPlan(rank=rank, group=self._group)
        self._sequence = 0
        self._newest_step: int | None = None
        self._background = BackgroundThread("replicate")
        self._sending: Future[None] | None = None
        self._has_warned = False
        self.cost_seconds: float | None = None
        """Seconds of training that one replica costs, smoothed.

        It is the sum of the wait for staging and a share of the processors' time.
        """

    @property
    def resume(self) -> ReplicatedStep | None:
        """The step in memory that the operator names for this generation."""
        return self._settings.resume

    def is_due(self, step: int, step_seconds: float | None) -> bool:
        """Whether to replicate after this step.

        Rank 0 decides for all ranks. The first step is always due, to measure the cost.
        """
        if self._is_busy():
            return False
        return self._newest_step is None or step - self._newest_step >= self.interval(step_seconds)

    def interval(self, step_seconds: float | None) -> int:
        """Steps from one replica to the next."""
        if self._settings.interval is not None:
            return self._settings.interval
        if self.cost_seconds is None or not step_seconds:
            return 1
        return max(1, math.ceil(self.cost_seconds / (COST_SHARE * step_seconds)))

    def explain(self, step_seconds: float | None) -> str:
        """The interval and the reason for it, for the status."""
        steps = self.interval(step_seconds)
        every = "every step" if steps == 1 else f"every {steps} steps"
        if self._settings.interval is not None:
            return f"in peers' memory {every}, as the job says"
        if self.cost_seconds is None:
            return f"in peers' memory {every} at first, to measure what that costs"
        return f"in peers' memory {every}, as that costs {1e3 * self.cost_seconds:.2g} ms of training"

    def replicate(
        self,
        state: dict[str, Any],
        *,
        step: int,
        extra: codec.Json,
        rank_state: Any,
        started: float | None = None,
    ) -> bool:
        """Stage `state`, and send it in the background.

        Args:
            state: What to replicate. Sharded tensors come from every rank, everything else from rank 0.
            step: Number of steps that the state has seen.
            extra: Plain values that are stored beside the state, from rank 0, as the codec encodes them.
            rank_state: Plain values of this rank.
            started: When training started to wait for this call, by time.monotonic. Default: now.

        Returns:
            Whether it was staged. False, on all ranks, while the previous one is under way on one of them.
        """
        started = time.monotonic() if started is None else started
        tensors, tree = codec.split(state)
        own, of_rank = codec.encode_of_rank(rank_state, self._rank)
        tensors |= own
        (busy, outdated), _ = self._collectives.any_and_token(self._is_busy(), self._plan.is_outdated(tensors))
        self._newest_step = step
        if busy:
            return False
        plan = self._plan.of(tensors, outdated=outdated)
        data = self._staging.stage(plan, tensors).data
        receipt = Receipt(rank=self._rank, world_size=self._world_size, entries=plan.entries, rank_state=of_rank)
        other = json.dumps({"tree": tree, "extra": extra}).encode() if self._rank == 0 else None
        self._sequence += 1
        place = HeldShards(
            generation=self._generation,
            sequence=self._sequence,
            step=step,
            world_size=self._world_size,
            ranks=(self._rank,),
        )
        stall_seconds = time.monotonic() - started
        self._sending = self._background.submit(lambda: self._send(data, receipt, other, place, stall_seconds))
        return True

    def read(self, checkpoint: ReplicatedStep) -> tuple[Manifest, PartReader]:
        """Make the manifest of a step in memory, and a reader of its data.

        The manifest is made from the step's receipts.

        Raises:
            CheckpointError: On all ranks.
        """
        source = ReplicaReader(checkpoint, self._settings.token)
        manifest = self._collectives.from_rank_0(lambda: _manifest(source, checkpoint), TypeAdapter(Manifest))
        return manifest, PartReader(source, source.prefix, manifest)

    def close(self) -> None:
        """Wait for the replica under way."""
        if self._sending is not None:
            wait([self._sending])

    def _is_busy(self) -> bool:
        return self._sending is not None and not self._sending.done()

    def _send(
        self, data: memoryview, receipt: Receipt, other: bytes | None, place: HeldShards, stall_seconds: float
    ) -> None:
        started = time.thread_time()
        file = DataFile(size=len(data), crc32=block_checksums(data))
        attempt = prefix(place.generation, place.sequence)
        objects: dict[str, Buffer] = {data_key(attempt, self._rank): data}
        if other is not None:
            objects[state_key(attempt)] = other
        objects[receipt_key(attempt, self._rank)] = serialise(receipt.model_copy(update={"file": file}))[0]

        def put(member: ReplicaClient) -> float:
            """Send to one member. Returns the processor time of both sides, in seconds."""
            begun, there = time.thread_time(), 0.0
            try:
                there = member.put(objects, place)
                self._has_warned = False
            except CheckpointError as error:
                # Training continues without a replica, and the next one may succeed: one sentence is enough.
                if not self._has_warned:
                    logger.warning("Step %d is not in peers' memory. %s", place.step, error)
                self._has_warned = True
            return time.thread_time() - begun + there

        with ThreadPoolExecutor(len(self._members)) as pool:
            sending = sum(pool.map(put, self._members))
        # This node receives as much as it sends: its own shards, and as many from a different member.
        cost = stall_seconds + (time.thread_time() - started + sending) * self._processor_share
        if place.sequence == 1:
            return  # the first cost includes the plan and the allocation of memory
        known = self.cost_seconds
        self.cost_seconds = cost if known is None else _SMOOTHING * cost + (1 - _SMOOTHING) * known


def _manifest(source: ReplicaReader, checkpoint: ReplicatedStep) -> Manifest:
    """Build the manifest. Raises CorruptCheckpoint if parts are missing or don't fit together."""
    where = f"The replica of step {checkpoint.step} in members' memory"
    try:
        found = [source.get(receipt_key(source.prefix, rank))[0] for rank in range(checkpoint.world_size)]
        receipts = [Receipt.parse(data) for data in found]
        other = json.loads(source.get(state_key(source.prefix))[0])
        return build_manifest(
            receipts,
            generation=checkpoint.generation,
            step=checkpoint.step,
            tree=other["tree"],
            extra=other["extra"],
        )
    except ObjectNotFound as error:
        raise CorruptCheckpoint(f"{where} is not whole: {error.key} is missing.") from error
    except (ValidationError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"{where} is damaged: {error}") from error
