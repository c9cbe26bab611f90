"""Shards of replicated steps in members' memory: who holds what, and where they go."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .message import Message


class MemoryStep(Message):
    """One replicated step, as far as one member's memory holds it: all that the `ranks` of a world of `world_size`
    had staged after `step`. `sequence` counts the generation's replicated steps."""

    generation: int
    sequence: int
    step: int
    world_size: int
    ranks: tuple[int, ...]


class MemoryHolder(Message):
    """A member whose memory holds the shards of some ranks."""

    address: Annotated[str, Field(description="Address and port of the member's memory.")]
    ranks: Annotated[tuple[int, ...], Field(description="Ranks whose shards it holds.")]


class MemoryCheckpoint(Message):
    """A replicated step of which every rank's shard is in the memory of a member that is still there."""

    generation: Annotated[int, Field(description="Number of the generation that replicated it.")]
    sequence: Annotated[int, Field(description="Number of the replica in that generation.")]
    step: Annotated[int, Field(description="Optimizer steps that it holds, counted from the job's start.")]
    world_size: Annotated[int, Field(description="Number of ranks of that generation.")]
    holders: Annotated[tuple[MemoryHolder, ...], Field(description="Members whose memory holds the shards.")]


class PeerMemory(Message):
    """Where a member's ranks replicate their shards: into its own memory and its peer's. `peer` None: there is no
    other member. `interval` None: as often as costs little. `resume` is what to begin with, if the store has nothing
    newer. The token opens the memory of all members of the generation, and of no other."""

    token: str
    own: str
    peer: str | None = None
    interval: int | None = None
    resume: MemoryCheckpoint | None = None
