"""What the zygote imports ahead, and what becomes of failed imports and forks."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from spottrain_agent import zygote_process
from spottrain_agent.launcher import LaunchRequest
from spottrain_agent.processes import Reaper
from spottrain_agent.zygote import REQUIRED_MODULES, preload
from spottrain_agent.zygote_process import LaunchFailed, ZygoteProcess
from spottrain_api.contract import Entrypoint


@pytest.mark.parametrize("kind", ["ImportError", "OSError", "AttributeError"])
def test_a_module_that_is_not_there_is_passed_over_in_silence_and_a_broken_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    (tmp_path / "breaks_at_import.py").write_text(f"raise {kind}('libnothing.so is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    preload(["json", "spottrain_api.of_another_release", "breaks_at_import"])
    assert capsys.readouterr().err == "spottrain: not preloaded: breaks_at_import (libnothing.so is missing)\n"


# The zygote's fork forks the launcher.
TORCH_WITHOUT_A_SECOND_FORK = """
import os

zygote, fork = os.getpid(), os.fork

def fork_once():
    if os.getpid() != zygote:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

os.fork = fork_once
"""


async def test_a_launch_whose_second_fork_fails_is_tried_by_the_next_zygotes_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in REQUIRED_MODULES:
        folder = tmp_path / name.replace(".", "/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(TORCH_WITHOUT_A_SECOND_FORK if name == "torch" else "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(zygote_process, "RESTART_DELAY_SECONDS", 0.0)
    loop = asyncio.get_running_loop()
    reaper = Reaper()
    reaper.attach(loop)
    zygotes = ZygoteProcess(reaper, on_change=lambda: None)
    running = asyncio.create_task(zygotes.run())
    request = LaunchRequest(
        torchrun_arguments=(), environment={}, entrypoint=Entrypoint(script="train.py"), run_dir=str(tmp_path)
    )
    try:
        with pytest.raises(LaunchFailed, match="Read the pod's log"):
            async with asyncio.timeout(60):
                await zygotes.launch(request)
        await zygotes.settle()
    finally:
        running.cancel()
        loop.remove_signal_handler(signal.SIGCHLD)
    assert "can't be started: [Errno 11] Resource temporarily unavailable" in capfd.readouterr().err
