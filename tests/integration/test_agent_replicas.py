"""The process that holds replicas beside a real agent.

It outlives generations. When it dies, the agent starts it again.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from agent_pods import GATHER, FakeOperator, Pods
from spottrain.checkpoint.errors import StorageDenied
from spottrain.checkpoint.peers.replica_client import ReplicaClient
from spottrain_agent.processes import descendants
from spottrain_api.contract.assignments import AgentPhase, Assignment
from spottrain_api.contract.replicas import HeldShards


def with_replicas(assignments: dict[str, Assignment], token: str) -> dict[str, Assignment]:
    opened_for = {}
    for name, assignment in assignments.items():
        generation = assignment.generation
        assert generation is not None
        opened = generation.model_copy(update={"replica_token": token})
        opened_for[name] = assignment.model_copy(update={"generation": opened})
    return opened_for


def replica_process(agent: int) -> int:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(agent)}
    (found,) = [pid for pid, command in commands.items() if b"replica_store" in command]
    return found


async def test_what_is_held_outlives_the_generation(pods: Pods, operator: FakeOperator) -> None:
    pods.start("a")
    await pods.warm()
    entrypoint = pods.script(GATHER)
    port = operator.reports["a"].replica_port
    step = HeldShards(generation=1, sequence=3, step=30, world_size=1, ranks=(0,))

    async def run(number: int, token: str) -> ReplicaClient:
        await operator.assign(with_replicas(pods.generation(number, entrypoint, ["a"]), token))
        await operator.wait_for_phase(AgentPhase.SUCCEEDED, number, ["a"])
        return ReplicaClient(f"{pods.addresses['a']}:{port}", token)

    first = await run(1, "one")
    await asyncio.to_thread(first.put, {"1/3/rank-0.data": b"shard"}, step)
    await operator.wait_for(lambda: operator.reports["a"].held == (step,))

    second = await run(2, "two")
    assert operator.reports["a"].held == (step,)
    assert await asyncio.to_thread(second.get, "1/3/rank-0.data") == b"shard"
    with pytest.raises(StorageDenied, match="not open to this generation"):
        await asyncio.to_thread(first.get, "1/3/rank-0.data")

    os.kill(replica_process(pods.processes["a"].pid), signal.SIGKILL)
    await operator.wait_for(lambda: operator.reports["a"].held == ())
    third = await run(3, "three")
    await asyncio.to_thread(third.put, {}, step)
    await operator.wait_for(lambda: operator.reports["a"].held == (step,))
