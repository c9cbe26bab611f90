"""A command of a probe, whose end and whose cancellation may come at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from spottrain_local.node.container_worker import run_command
from spottrain_local.node.containers import ContainerRuntime, HostCommand, Terminated

COMMAND = HostCommand(argv=("true",), env={}, cwd="/")


class Command:
    """Runs until `ended` is set."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def execute(self, command: HostCommand, directory: Path) -> Command:
        return self

    async def wait(self) -> Terminated:
        await self.ended.wait()
        return Terminated(exit_code=0, reason="Completed", started_at="", finished_at="")

    def kill(self) -> None:
        self.ended.set()


@pytest.mark.parametrize("num_turns", range(8))
async def test_a_probe_ends_with_its_container(tmp_path: Path, num_turns: int) -> None:
    """However many turns of the loop its own end came before."""
    command = Command()
    probe = asyncio.create_task(run_command(cast("ContainerRuntime", cast("Any", command)), COMMAND, tmp_path, 10.0))
    for _ in range(10):
        await asyncio.sleep(0)
    command.ended.set()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    is_cancelled = probe.cancel()
    await asyncio.wait({probe}, timeout=10)
    assert probe.done()
    assert probe.cancelled() is is_cancelled
