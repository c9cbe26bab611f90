"""Starts of a generation that fail are reported, and a SIGTERM is never lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from control_api_setup import until
from spottrain_agent import agent as agent_module
from spottrain_agent.agent import Agent
from spottrain_agent.generation_run import GenerationRun
from spottrain_agent.settings import AgentSettings
from spottrain_api.contract import (
    AgentPhase,
    Assignment,
    AssignmentAction,
    Entrypoint,
    Failure,
    FailureReason,
    GenerationAssignment,
)


async def failure_of_a_start(entrypoint: Entrypoint, folder: Path) -> Failure:
    """What an agent reports that is to run this program."""
    agent = Agent(
        AgentSettings(
            control_url="http://127.0.0.1:9",
            control_dir=None,
            token_file=None,
            pod="a",
            pod_uid="u",
            pod_ip="127.0.0.1",
            node="n",
            watcher_url=None,
            grace_seconds=30.0,
            run_root=folder / "runs",
        )
    )
    generation = GenerationAssignment(
        number=1,
        rendezvous_id="r",
        rendezvous_endpoint="127.0.0.1:9",
        node_rank=0,
        num_nodes=1,
        entrypoint=entrypoint,
        trainer={},
    )
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
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "SPOTTRAIN_CONTROL_URL": "http://127.0.0.1:9",
        "SPOTTRAIN_POD_NAME": "a-0",
        "SPOTTRAIN_POD_UID": "u",
        "SPOTTRAIN_POD_IP": "127.0.0.1",
        "SPOTTRAIN_RUN_ROOT": str(tmp_path),
    }
    command = [sys.executable, "-c", AGENT_THAT_GETS_SIGTERM_DURING_ITS_IMPORTS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0
    assert "SIGTERM: leaving by" in ended.stderr
