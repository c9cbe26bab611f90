"""A process ends with its parent, also if that has ended before the request."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from spottrain_agent import zygote
from spottrain_agent.launcher import LaunchRequest
from spottrain_api.settings.entrypoint import Entrypoint
from spottrain_runtime.processes import die_with_parent

ALIVE = 7
ENDED = 2**22 + 1  # larger than any process ID


def exit_code_of_fork(action: Callable[[int], None]) -> int:
    """The exit code of a fork that runs `action`.

    The action takes the process ID of the parent. ALIVE if it returns.
    """
    parent = os.getpid()
    child = os.fork()
    if not child:
        try:
            action(parent)
            os._exit(ALIVE)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_whose_parent_has_ended_ends_at_once() -> None:
    assert exit_code_of_fork(lambda parent: die_with_parent(ENDED)) == 1
    assert exit_code_of_fork(lambda parent: die_with_parent(parent)) == ALIVE
    assert exit_code_of_fork(lambda parent: die_with_parent()) == ALIVE


def test_a_launcher_whose_agent_was_killed_meanwhile_launches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = tmp_path / "launched"

    def run_launcher(request: LaunchRequest) -> int:
        launched.touch()
        return 0

    monkeypatch.setattr(zygote, "run_launcher", run_launcher)
    request = LaunchRequest(torchrun_arguments=(), environment={}, entrypoint=Entrypoint(script="x"), run_dir="")
    assert exit_code_of_fork(lambda parent: zygote._become_launcher(request, ENDED, former_parent=ENDED)) == 1
    assert not launched.exists()
    assert exit_code_of_fork(lambda parent: zygote._become_launcher(request, parent, former_parent=ENDED)) == 0
    assert launched.exists()
