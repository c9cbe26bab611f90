"""Replicas in peers' memory.

This module says who holds whose shards, and which replicated step survives a loss.

A step is complete if the next generation's members hold the shards of all its ranks between them. HEAD stays the
truth for everyone else: a generation that resumes from replicas commits that step first.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from spottrain_api.contract.assignments import Member
from spottrain_api.contract.replicas import HeldShards, ReplicaHolder, ReplicaSettings, ReplicatedStep
from spottrain_api.contract.reports import CommitRef
from spottrain_operator.core.facts.situation import PodFacts, Situation
from spottrain_operator.core.model import JobView


def newest_replicated_step(
    situation: Situation, chosen: Iterable[PodFacts], commit: CommitRef | None
) -> ReplicatedStep | None:
    """The newest replicated step that the pods of a new generation hold completely.

    None if `commit` is not older than it. Other pods don't learn that generation's token, and may go when it starts.
    """
    if not situation.spec.checkpoint.peer_replicas:
        return None
    held: dict[tuple[int, int, int, int], list[tuple[str, HeldShards]]] = {}
    for facts in chosen:
        report = facts.report
        if report is None or report.replica_port is None:
            continue
        for step in report.held:
            place = (step.generation, step.sequence, step.step, step.world_size)
            held.setdefault(place, []).append((address_of(facts.pod.ip or "", report.replica_port), step))
    for place in sorted(held, reverse=True):
        generation, sequence, step_number, world_size = place
        if commit is not None and (generation < commit.generation or step_number <= commit.step):
            continue
        holders = _holders(held[place], world_size)
        if holders is not None:
            return ReplicatedStep(
                generation=generation, sequence=sequence, step=step_number, world_size=world_size, holders=holders
            )
    return None


def _holders(held: Iterable[tuple[str, HeldShards]], world_size: int) -> tuple[ReplicaHolder, ...] | None:
    """One holder for each rank; None if a rank has none."""
    found: set[int] = set()  # not the missing ones: an agent may report any world_size
    holders = []
    for address, step in sorted(held, key=lambda each: each[0]):
        if ranks := sorted(rank for rank in set(step.ranks) - found if rank < world_size):
            holders.append(ReplicaHolder(address=address, ranks=tuple(ranks)))
            found.update(ranks)
    return tuple(holders) if len(found) == world_size else None


def replica_settings(job: JobView, node_rank: int, key: bytes) -> ReplicaSettings | None:
    """Where the ranks of a member replicate to: the next member on another node.

    None if the job doesn't ask for replicas.

    Args:
        job: The job, as the API server has it.
        node_rank: The member's.
        key: The operator's secret. A new operator gives other tokens, but an agent keeps those with which its
            generation started.
    """
    generation, checkpoint = job.status.generation, job.spec.checkpoint
    if generation is None or not checkpoint.peer_replicas:
        return None
    members = sorted(generation.members, key=lambda member: member.node_rank)
    # After a restore of the status, not all members are known.
    position = [member.node_rank for member in members].index(node_rank)
    me, others = members[position], members[position + 1 :] + members[:position]
    if me.replica_port is None:
        return None
    return ReplicaSettings(
        token=hmac.digest(key, f"{job.uid}/{generation.number}".encode(), "sha256").hex(),
        own=address_of(me.address, me.replica_port),
        peer=_peer(others, me.node),
        interval=checkpoint.peer_interval,
        resume=generation.replicated_step,
    )


def _peer(others: list[Member], node: str) -> str | None:
    """The address of the first of `others` that takes replicas, and isn't on `node`."""
    addresses = (
        address_of(m.address, m.replica_port) for m in others if m.replica_port is not None and m.node != node
    )
    return next(addresses, None)


def address_of(ip: str, port: int) -> str:
    """The address "ip:port", for IPv6, too."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
