"""The shim and the process runtime: nothing is left behind, and exits and output are on record."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spottrain_local.node import shim
from spottrain_local.node.containers import ContainerRun, StartError, Terminated
from spottrain_local.node.process_runtime import ProcessRuntime

MARK = "SPOTTRAIN_SHIM_TEST"


def marked(mark: str) -> list[int]:
    """Processes with our mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def wait_until_none(mark: str, seconds: float = 5) -> float:
    """Seconds until no marked process is left."""
    began = time.monotonic()
    while marked(mark):
        assert time.monotonic() - began < seconds, f"still there: {marked(mark)}"
        time.sleep(0.01)
    return time.monotonic() - began


@pytest.fixture
def mark(request: pytest.FixtureRequest) -> Iterator[str]:
    """A mark for this test's processes; whatever is left is killed."""
    name = f"{os.getpid()}-{request.node.name}"
    yield name
    for pid in marked(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def runtime() -> ProcessRuntime:
    return ProcessRuntime()


def run(tmp_path: Path, mark: str, *argv: str) -> ContainerRun:
    return ContainerRun(
        argv=argv,
        env={"PATH": os.environ["PATH"], MARK: mark},
        cwd=tmp_path,
        log_path=tmp_path / "0.log",
        directory=tmp_path / "0",
        container_id="process://x",
    )


def output(tmp_path: Path) -> list[str]:
    return [line.split(" ", 3)[3] for line in (tmp_path / "0.log").read_text().splitlines()]


async def wait_for_output(tmp_path: Path, line: str) -> None:
    began = time.monotonic()
    while not (tmp_path / "0.log").exists() or line not in output(tmp_path):
        assert time.monotonic() - began < 5, f"{line!r} was not printed"
        await asyncio.sleep(0.01)


async def test_exit_code_and_output_are_recorded(tmp_path: Path, mark: str, runtime: ProcessRuntime) -> None:
    container = await runtime.start(run(tmp_path, mark, "sh", "-c", "echo one; echo two >&2; printf three; exit 7"))
    ended = await container.wait()
    assert (ended.exit_code, ended.signal, ended.reason) == (7, 0, "Error")
    assert output(tmp_path) == ["one", "two", "three"]
    assert runtime.recover(tmp_path / "0", "process://x") == ended


async def test_a_signal_is_an_exit_code_above_128(tmp_path: Path, mark: str, runtime: ProcessRuntime) -> None:
    ended = await (await runtime.start(run(tmp_path, mark, "sh", "-c", "kill -9 $$"))).wait()
    assert (ended.exit_code, ended.signal) == (137, 9)


async def test_the_environment_is_exactly_the_given_one(tmp_path: Path, mark: str, runtime: ProcessRuntime) -> None:
    await (await runtime.start(run(tmp_path, mark, "env"))).wait()
    assert {line.partition("=")[0] for line in output(tmp_path)} == {"PATH", MARK}


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (("no-such-command",), "'no-such-command' was not found on the PATH"),
        (("/no/such/file",), "'/no/such/file' does not exist"),
        (("/etc",), "cannot be started: Permission denied"),
    ],
)
async def test_a_command_that_cannot_start(
    tmp_path: Path, mark: str, runtime: ProcessRuntime, argv: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(StartError, match=sentence):
        await runtime.start(run(tmp_path, mark, *argv))


async def test_everything_ends_with_the_first_process(tmp_path: Path, mark: str, runtime: ProcessRuntime) -> None:
    script = "setsid sleep 100 & (setsid sh -c 'sleep 100 & sleep 100' &); sleep 0.1; exit 0"
    ended = await (await runtime.start(run(tmp_path, mark, "sh", "-c", script))).wait()
    assert ended.exit_code == 0
    assert marked(mark) == []


async def test_sigterm_reaches_the_command_which_may_end_by_itself(
    tmp_path: Path, mark: str, runtime: ProcessRuntime
) -> None:
    script = "trap 'echo bye; exit 5' TERM; echo ready; while true; do sleep 0.02; done"
    container = await runtime.start(run(tmp_path, mark, "sh", "-c", script))
    await wait_for_output(tmp_path, "ready")
    container.terminate()
    assert (await container.wait()).exit_code == 5
    assert output(tmp_path)[-1] == "bye"


async def test_kill_ends_what_ignores_sigterm(tmp_path: Path, mark: str, runtime: ProcessRuntime) -> None:
    script = "trap '' TERM; setsid sh -c \"trap '' TERM; while true; do sleep 0.02; done\" & echo ready; wait; wait"
    container = await runtime.start(run(tmp_path, mark, "sh", "-c", script))
    await wait_for_output(tmp_path, "ready")
    container.terminate()
    container.kill()
    assert (await container.wait()).exit_code == 137
    assert marked(mark) == []


KILLED_SHIM = """
import asyncio, os, signal, sys
from pathlib import Path
from spottrain_local.node.containers import ContainerRun
from spottrain_local.node.process_runtime import ProcessRuntime

async def main(folder):
    script = "setsid sleep 100 & (setsid sleep 100 &); sleep 100"
    container = await ProcessRuntime(owns_process=True).start(ContainerRun(
        argv=("sh", "-c", script), env=dict(os.environ), cwd=folder, log_path=folder / "0.log",
        directory=folder / "0", container_id="process://x"))
    os.kill(container.shim_pid, signal.SIGKILL)
    print((await container.wait()).exit_code, flush=True)
    await asyncio.sleep(60)

asyncio.run(main(Path(sys.argv[1])))
"""


def test_a_killed_shim_leaves_nothing(tmp_path: Path, mark: str) -> None:
    env = {"PATH": os.environ["PATH"], MARK: mark}
    command = [sys.executable, "-c", KILLED_SHIM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == b"137\n"
        began = time.monotonic()
        while marked(mark) != [node.pid]:
            assert time.monotonic() - began < 5, f"still there: {marked(mark)}"
            time.sleep(0.01)
        node.kill()


def test_a_killed_node_process_leaves_nothing(tmp_path: Path, mark: str) -> None:
    """The kernel tells the shim, and the shim kills all, sessions of their own included."""
    script = "trap '' TERM; setsid sleep 100 & (setsid sh -c 'sleep 100 & sleep 100' &); echo ready; sleep 100"
    spec = {
        "argv": ["sh", "-c", script],
        "env": {"PATH": os.environ["PATH"], MARK: mark},
        "cwd": str(tmp_path),
        "log": str(tmp_path / "0.log"),
        "exit": str(tmp_path / "exit.json"),
        "logMaxBytes": 10000,
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    code = (
        "import os, subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-I', '-S', {shim.__file__!r}, 'spec.json', str(os.getpid())])\n"
        "p.wait()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, env={MARK: mark}
    ) as parent:
        assert parent.stdout is not None
        assert b"started" in parent.stdout.readline()
        deadline = time.monotonic() + 5
        while len(marked(mark)) < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
        parent.kill()
        parent.wait()
        assert wait_until_none(mark) < 1.0
    assert json.loads((tmp_path / "exit.json").read_text())["exitCode"] == 137


def test_long_lines_are_split_and_marked_partial(tmp_path: Path) -> None:
    log = shim.LogFile(str(tmp_path / "log"), 10**6)
    log.write(b"x" * (shim.MAX_LINE_BYTES + 10) + b"\nshort\nrest")
    log.finish()
    tags = [line.split(" ", 3)[2] for line in (tmp_path / "log").read_text().splitlines()]
    assert tags == ["P", "F", "F", "F"]


def test_a_log_that_grows_is_moved_aside(tmp_path: Path) -> None:
    log = shim.LogFile(str(tmp_path / "log"), 1000)
    for number in range(30):
        log.write(b"line %d\n" % number)
    log.finish()
    assert (tmp_path / "log.1").stat().st_size <= 1000
    assert (tmp_path / "log").read_text().splitlines()[-1].endswith("line 29")


async def test_a_runtime_without_a_record_knows_nothing(tmp_path: Path, runtime: ProcessRuntime) -> None:
    found: Terminated | None = runtime.recover(tmp_path, "process://x")
    assert found is None
