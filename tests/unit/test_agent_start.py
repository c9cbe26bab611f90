"""Starts of a generation that fail are reported, and a SIGTERM is never lost."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lone_member
from control_api_setup import until
from control_folder import control_folder
from spottrain_agent import agent as agent_module
from spottrain_agent.agent import Agent
from spottrain_agent.generation_run import GenerationRun
from spottrain_agent.ports import ReservedPort
from spottrain_agent.zygote_process import LAUNCH_ATTEMPTS, spawn_zygote
from spottrain_api.contract.assignments import AgentPhase, Assignment, AssignmentAction
from spottrain_api.contract.reports import Failure, FailureReason
from spottrain_api.settings.entrypoint import Entrypoint


async def failure_of_a_start(entrypoint: Entrypoint, folder: Path) -> Failure:
    """What an agent reports that is to run this program."""
    agent = Agent(lone_member.settings(folder / "runs"), spawn_zygote)
    generation = lone_member.generation(entrypoint)
    agent._on_assignment(Assignment(action=AssignmentAction.RUN, generation=generation))
    await until(lambda: agent._report().phase is AgentPhase.FAILED)
    failure = agent._report().failure
    assert failure is not None
    return failure


@pytest.fixture(autouse=True)
def _kill_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process, not the pod's first one, has started isn't the agent's."""

    async def kill_nothing(**_: Any) -> None: ...

    monkeypatch.setattr(agent_module, "kill_descendants", kill_nothing)


async def test_an_entrypoint_that_the_system_refuses_to_look_for_is_reported(tmp_path: Path) -> None:
    failure = await failure_of_a_start(Entrypoint(script=str(tmp_path / ("n" * 300))), tmp_path)
    assert failure.reason is FailureReason.ENTRYPOINT_NOT_FOUND


async def test_an_error_of_the_agent_itself_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*_: object) -> None:
        raise KeyError("zygote")

    monkeypatch.setattr(GenerationRun, "start", start)
    (tmp_path / "train.py").touch()
    failure = await failure_of_a_start(Entrypoint(script=str(tmp_path / "train.py")), tmp_path)
    assert failure == Failure(reason=FailureReason.START_FAILED, message="The agent failed: KeyError('zygote')")


async def test_a_start_without_a_free_file_descriptor_for_the_next_port_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = [ReservedPort("127.0.0.1")]

    def reserve(_: str) -> ReservedPort:
        if not ports:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return ports.pop()

    monkeypatch.setattr(agent_module, "ReservedPort", reserve)
    failure = await failure_of_a_start(Entrypoint(script="train.py"), tmp_path)
    assert failure == Failure(reason=FailureReason.START_FAILED, message="[Errno 24] Too many open files")


def run_agent(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code that starts an agent without an operator, until it ends.

    Its modules may be in the folder.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
        "SPOTTRAIN_CONTROL_DIR": str(control_folder(folder / "control", "http://127.0.0.1:9")),
        "SPOTTRAIN_POD_NAME": "a-0",
        "SPOTTRAIN_POD_UID": "u",
        "SPOTTRAIN_POD_IP": "127.0.0.1",
        "SPOTTRAIN_RUN_ROOT": str(folder),
    }
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


AGENT_THAT_GETS_SIGTERM_DURING_ITS_IMPORTS = """
import os, runpy, signal, sys

class Sender:
    def find_spec(self, name, path, target=None):
        if name == "spottrain_agent.settings":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Sender())
runpy.run_module("spottrain_agent", run_name="__main__")
"""


def test_an_agent_that_gets_sigterm_before_its_handler_is_there_leaves(tmp_path: Path) -> None:
    ended = run_agent(AGENT_THAT_GETS_SIGTERM_DURING_ITS_IMPORTS, tmp_path)
    assert ended.returncode == 0
    assert "SIGTERM: leaving by" in ended.stderr


AGENT_WITHOUT_PAUSES = """
import sys
from spottrain_agent import zygote_process
from spottrain_agent.command import main

zygote_process.RESTART_DELAY_SECONDS = 0.0
sys.exit(main())
"""


AGENT_WHOSE_CONTACT_FAILS_AS_IT_ENDS = (
    """
import asyncio
from spottrain_agent.contact import Contact

async def keep(*_):
    try:
        await asyncio.Event().wait()
    finally:
        raise OSError("the connection is gone")

Contact.keep = keep
"""
    + AGENT_WITHOUT_PAUSES
)


WITHOUT_TORCH = "The image's Python can't import torch: libcudart.so is missing. Install torch in the image."


def test_the_reason_is_the_last_line_whatever_fails_as_the_agent_ends(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so is missing')")
    ended = run_agent(AGENT_WHOSE_CONTACT_FAILS_AS_IT_ENDS, tmp_path)
    assert "the connection is gone" in ended.stderr
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (1, f"spottrain-agent: {WITHOUT_TORCH}")


def test_an_agent_whose_image_can_not_import_torch_ends_with_that_sentence(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("print('importing'); raise OSError('libcudart.so\\nis missing')")
    ended = run_agent(AGENT_WITHOUT_PAUSES, tmp_path)
    lines = ended.stderr.splitlines()
    assert (ended.returncode, lines[-1]) == (1, f"spottrain-agent: {WITHOUT_TORCH}")
    assert sum(WITHOUT_TORCH in line for line in lines[:-1]) == 1, (
        "it is logged once, however many zygotes end with it"
    )
    assert ended.stdout.count("importing") == LAUNCH_ATTEMPTS
