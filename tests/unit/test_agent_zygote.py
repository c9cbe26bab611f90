"""What the zygote imports ahead, and what becomes of failed imports and forks."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from spottrain_agent import zygote_process
from spottrain_agent.launcher import LaunchRequest
from spottrain_agent.processes import Reaper
from spottrain_agent.zygote import REQUIRED_MODULES, preload
from spottrain_agent.zygote_process import LaunchFailed, ZygoteProcess, spawn_zygote
from spottrain_api.settings.entrypoint import Entrypoint


@pytest.mark.parametrize("kind", ["ImportError", "OSError", "AttributeError"])
def test_a_module_that_is_not_there_is_passed_over_in_silence_and_a_broken_one_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    (tmp_path / "breaks_at_import.py").write_text(f"raise {kind}('libnothing.so is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    preload(["json", "spottrain_api.of_another_release", "breaks_at_import"])
    assert capsys.readouterr().err == "spottrain: not preloaded: breaks_at_import (libnothing.so is missing)\n"


# The zygote's fork forks the launcher.
TORCH_WHOSE_FORKS_ARE_KILLED_AT_THEIR_END = """
import os, signal

zygote, end = os.getpid(), os._exit

def end_or_die(code):
    if os.getppid() == zygote:
        os.kill(os.getpid(), signal.SIGKILL)
    end(code)

os._exit = end_or_die
"""
TORCH_WITHOUT_A_SECOND_FORK = """
import os

zygote, fork = os.getpid(), os.fork

def fork_once():
    if os.getpid() != zygote:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

os.fork = fork_once
"""


def use_torch(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let zygotes import this for torch."""
    for name in REQUIRED_MODULES:
        module = folder / name.replace(".", "/")
        module.mkdir(parents=True, exist_ok=True)
        (module / "__init__.py").write_text(code if name == "torch" else "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    monkeypatch.setattr(zygote_process, "RESTART_DELAY_SECONDS", 0.0)


@asynccontextmanager
async def running_zygotes() -> AsyncIterator[ZygoteProcess]:
    loop = asyncio.get_running_loop()
    reaper = Reaper()
    reaper.attach(loop)
    zygotes = ZygoteProcess(reaper, on_change=lambda: None, spawn=spawn_zygote)
    running = asyncio.create_task(zygotes.run())
    try:
        async with asyncio.timeout(60):
            yield zygotes
    finally:
        running.cancel()
        loop.remove_signal_handler(signal.SIGCHLD)


def launch_request(folder: Path) -> LaunchRequest:
    return LaunchRequest(
        torchrun_arguments=(), environment={}, entrypoint=Entrypoint(script="train.py"), run_dir=str(folder)
    )


async def test_a_launch_whose_second_fork_fails_is_tried_by_the_next_zygotes_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    use_torch(TORCH_WITHOUT_A_SECOND_FORK, tmp_path, monkeypatch)
    async with running_zygotes() as zygotes:
        with pytest.raises(LaunchFailed, match="Read the pod's log"):
            await zygotes.launch(launch_request(tmp_path))
        await zygotes.settle()
    assert "can't be started: [Errno 11] Resource temporarily unavailable" in capfd.readouterr().err


async def test_a_zygote_whose_fork_is_killed_after_it_has_forked_the_launcher_serves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a STOP at the moment of a launch, which kills all that it finds."""
    use_torch(TORCH_WHOSE_FORKS_ARE_KILLED_AT_THEIR_END, tmp_path, monkeypatch)
    async with running_zygotes() as zygotes:
        asked = []
        for _ in range(2):
            await zygotes.launch(launch_request(tmp_path))
            asked.append(zygotes.pid)
    assert asked[0] == asked[1]
