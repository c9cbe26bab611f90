"""Replicas: shards of a step in the members' memory.

The messages say who holds which, and where ranks send them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spottrain_api.contract.message import Message


class HeldShards(Message):
    """The shards of one replicated step that a member holds.

    They are those of `ranks`, in a world of `world_size`, after `step`. `sequence` counts the generation's replicated
    steps.
    """

    generation: int
    sequence: int
    step: int
    world_size: int
    ranks: tuple[int, ...]


class ReplicaHolder(Message):
    """A member that holds the shards of some ranks in memory."""

    address: Annotated[str, Field(description="Address and port at which the member serves them.")]
    ranks: Annotated[tuple[int, ...], Field(description="Ranks whose shards it holds.")]


class ReplicatedStep(Message):
    """A replicated step that the remaining members hold completely.

    Every rank's shard is in the memory of one of them.
    """

    generation: Annotated[int, Field(description="Number of the generation that replicated it.")]
    sequence: Annotated[int, Field(description="Number of the replica in that generation.")]
    step: Annotated[int, Field(description="Optimizer steps that it holds, counted from the job's start.")]
    world_size: Annotated[int, Field(description="Number of ranks of that generation.")]
    holders: Annotated[tuple[ReplicaHolder, ...], Field(description="Members that hold the shards in memory.")]


class ReplicaSettings(Message):
    """Where a member's ranks replicate their shards.

    They replicate into the memory of their own member and of its peer.

    - token: opens the replicas of all members of the generation, and of no others.
    - own, peer: "address:port" of the two. `peer` None: there is no other member.
    - interval: steps from one replica to the next. None: as often as costs little.
    - resume: the step to resume from, unless the store has a newer one.
    """

    token: str
    own: str
    peer: str | None = None
    interval: int | None = None
    resume: ReplicatedStep | None = None
