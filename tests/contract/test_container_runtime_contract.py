"""What every ContainerRuntime promises, against processes and podman."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from container_worlds import World, podman_world, process_world
from marked_processes import MARK, marked
from spottrain_local.node.containers import StartError

DEAF = "trap '' TERM; setsid sh -c \"trap '' TERM; while true; do sleep 0.02; done\" & echo ready; wait; wait"


@pytest.fixture(params=["process", pytest.param("podman", marks=pytest.mark.containers)])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    mark = f"{os.getpid()}-{request.node.name}"
    if request.param == "process":
        make = process_world(tmp_path, mark)
    else:
        make = podman_world(tmp_path, mark, request.getfixturevalue("base_image"))
    try:
        async with make as world:
            yield world
    finally:
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def test_exit_code_and_output_are_recorded(world: World) -> None:
    run = world.run("sh", "-c", "echo one; echo two; printf three; exit 7")
    ended = await (await world.runtime.start(run)).wait()
    assert (ended.exit_code, ended.signal, ended.reason) == (7, 0, "Error")
    assert world.output() == ["one", "two", "three"]
    assert world.runtime.recover(run.directory, run.container_id) == ended


async def test_standard_error_is_recorded_too(world: World) -> None:
    assert (await (await world.start("sh", "-c", "echo one; echo two >&2")).wait()).exit_code == 0
    assert sorted(world.output()) == ["one", "two"]


async def test_a_signal_is_an_exit_code_above_128(world: World) -> None:
    container = await world.start("sh", "-c", "echo ready; sleep 100")
    await world.wait_for_output("ready")
    container.kill()
    assert (await container.wait()).exit_code == 137


async def test_the_environment_is_the_given_one_and_not_the_nodes(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOME_SECRET", "x")
        await (await world.start("env")).wait()
    names = {line.partition("=")[0] for line in world.output()}
    assert {"PATH", MARK} <= names
    assert "SOME_SECRET" not in names


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("no-such-command",), "'no-such-command' was not found on the PATH"),
        (("/no/such/file",), "'/no/such/file' does not exist"),
        (("/etc",), "cannot be started: Permission denied"),
    ],
)
async def test_a_command_that_cannot_start(world: World, command: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(StartError, match=sentence):
        await world.start(*command)


async def test_everything_ends_with_the_first_process(world: World) -> None:
    script = "setsid sleep 100 & (setsid sh -c 'sleep 100 & sleep 100' &); sleep 0.1; exit 0"
    assert (await (await world.start("sh", "-c", script)).wait()).exit_code == 0
    assert marked(world.mark) == []


async def test_sigterm_reaches_the_command_which_may_end_by_itself(world: World) -> None:
    script = "trap 'echo bye; exit 5' TERM; echo ready; while true; do sleep 0.02; done"
    container = await world.start("sh", "-c", script)
    await world.wait_for_output("ready")
    container.terminate()
    assert (await container.wait()).exit_code == 5
    assert world.output()[-1] == "bye"


async def test_kill_ends_what_ignores_sigterm(world: World) -> None:
    container = await world.start("sh", "-c", DEAF)
    await world.wait_for_output("ready")
    container.terminate()
    container.kill()
    assert (await container.wait()).exit_code == 137
    assert marked(world.mark) == []


async def test_a_command_runs_in_a_container_that_runs(world: World, tmp_path: Path) -> None:
    run = world.run("sh", "-c", "echo ready; sleep 100")
    container = await world.runtime.start(run)
    await world.wait_for_output("ready")
    command = world.runtime.exec_command(run, ("sh", "-c", f"echo ${MARK}; exit 3"))
    ended = await (await world.runtime.execute(command, tmp_path / "exec")).wait()
    assert ended.exit_code == 3
    assert (tmp_path / "exec" / "log").read_text().endswith(f" stdout F {world.mark}\n")
    container.kill()
    await container.wait()


async def test_a_command_in_a_container_can_be_ended(world: World, tmp_path: Path) -> None:
    run = world.run("sleep", "100")
    container = await world.runtime.start(run)
    of_the_command = f"{world.mark}-command"
    command = ("env", f"{MARK}={of_the_command}", "sleep", "100")
    executing = await world.runtime.execute(world.runtime.exec_command(run, command), tmp_path / "exec")
    began = time.monotonic()
    while not marked(of_the_command):
        assert time.monotonic() - began < 10, "the command does not start"
        await asyncio.sleep(0.01)
    executing.kill()
    await executing.wait()
    assert not marked(of_the_command)
    assert marked(world.mark), "the container itself goes on"
    container.kill()
    await container.wait()


async def test_a_runtime_without_a_record_knows_nothing(world: World, tmp_path: Path) -> None:
    assert world.runtime.recover(tmp_path / "nothing", "test://x") is None
