"""The shim: nothing is left behind, and exits and output are on record.

See also the contract of runtimes.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from container_worlds import printed
from marked_processes import MARK, marked
from spottrain_local.node import shim
from spottrain_local.node.containers import ContainerInput, HostCommand, StartError
from spottrain_local.node.shimmed_processes import ATTACH_SOCKET, ShimmedProcess, ShimmedProcesses


def wait_until(condition: Callable[[], bool], mark: str) -> None:
    """Wait for a condition on the marked processes."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"marked: {marked(mark)}"
        time.sleep(0.01)


@pytest.fixture
def mark(request: pytest.FixtureRequest) -> Iterator[str]:
    """A mark for this test's processes; whatever is left is killed."""
    name = f"{os.getpid()}-{request.node.name}"
    yield name
    for pid in marked(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def start(tmp_path: Path, mark: str, *argv: str, linger_seconds: float = 0.0) -> ShimmedProcess:
    command = HostCommand(argv=argv, env={"PATH": os.environ["PATH"], MARK: mark}, cwd=str(tmp_path))
    return await ShimmedProcesses().start(
        command, directory=tmp_path / "0", log_path=tmp_path / "0.log", linger_seconds=linger_seconds
    )


def output(tmp_path: Path) -> list[str]:
    return printed(tmp_path / "0.log")


async def wait_for_output(tmp_path: Path, line: str) -> None:
    began = time.monotonic()
    while line not in output(tmp_path):
        assert time.monotonic() - began < 30, f"{line!r} was not printed"
        await asyncio.sleep(0.01)


async def test_output_keeps_its_order(tmp_path: Path, mark: str) -> None:
    await (await start(tmp_path, mark, "sh", "-c", "echo one; echo two >&2; printf three")).wait()
    assert output(tmp_path) == ["one", "two", "three"]


async def test_a_signal_is_on_record(tmp_path: Path, mark: str) -> None:
    ended = await (await start(tmp_path, mark, "sh", "-c", "kill -9 $$")).wait()
    assert (ended.exit_code, ended.signal) == (137, 9)


async def test_an_exit_code_that_no_disk_takes_is_reported(tmp_path: Path, mark: str) -> None:
    process = await start(tmp_path, mark, "sh", "-c", "until [ -e go ]; do sleep 0.02; done; exit 3")
    (tmp_path / "0" / "exit.json.tmp").mkdir()
    (tmp_path / "go").touch()
    assert (await process.wait()).exit_code == 3


async def test_a_variable_that_no_process_can_have_is_reported(tmp_path: Path, mark: str) -> None:
    command = HostCommand(
        argv=("true",), env={"PATH": os.environ["PATH"], MARK: mark, "KEY": "\0"}, cwd=str(tmp_path)
    )
    with pytest.raises(StartError, match="The command 'true' cannot be started: embedded null byte"):
        await ShimmedProcesses().start(command, directory=tmp_path / "0", log_path=tmp_path / "0.log")


async def test_the_environment_is_exactly_the_given_one(tmp_path: Path, mark: str) -> None:
    await (await start(tmp_path, mark, "env")).wait()
    assert {line.partition("=")[0] for line in output(tmp_path)} == {"PATH", MARK}


async def test_what_a_command_started_may_linger(tmp_path: Path, mark: str) -> None:
    """What a command started writes one file after the command has ended.

    It is killed before it could write the other.
    """
    script = "(setsid sh -c 'while [ ! -e 0/exiting ]; do sleep 0.02; done; touch late; sleep 100; touch never' &); "
    process = await start(tmp_path, mark, "sh", "-c", script + "touch 0/exiting", linger_seconds=5.0)
    assert (await process.wait()).exit_code == 0
    assert (tmp_path / "late").exists()
    assert not (tmp_path / "never").exists()
    assert marked(mark) == []


@pytest.mark.parametrize("end", [ShimmedProcess.terminate, ShimmedProcess.kill], ids=["terminate", "kill"])
async def test_a_command_that_prints_without_pause_is_ended(
    tmp_path: Path, mark: str, end: Callable[[ShimmedProcess], None]
) -> None:
    process = await start(tmp_path, mark, "sh", "-c", "echo ready; exec yes")
    await wait_for_output(tmp_path, "ready")
    end(process)
    assert (await asyncio.wait_for(process.wait(), 30)).exit_code != 0
    assert marked(mark) == []


KILLED_SHIM = """
import asyncio, os, signal, sys
from pathlib import Path
from spottrain_local.node.containers import HostCommand
from spottrain_local.node.shimmed_processes import ShimmedProcesses

async def main(folder):
    script = "setsid sleep 100 & (setsid sleep 100 &); sleep 100"
    container = await ShimmedProcesses(owns_process=True).start(
        HostCommand(argv=("sh", "-c", script), env=dict(os.environ), cwd=str(folder)),
        directory=folder / "0", log_path=folder / "0.log")
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
        wait_until(lambda: marked(mark) == [node.pid], mark)
        node.kill()


def test_a_killed_node_process_leaves_nothing(tmp_path: Path, mark: str) -> None:
    """The kernel signals the shim, and the shim kills all processes.

    That includes those with sessions of their own.
    """
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
        wait_until(lambda: len(marked(mark)) >= 6, mark)
        parent.kill()
        parent.wait()
        wait_until(lambda: not marked(mark), mark)
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


def test_a_log_continues_when_the_disk_has_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    log = shim.LogFile(str(tmp_path / "log"), 1000)
    with monkeypatch.context() as disk:
        disk.setattr(os, "open", full)
        for _ in range(30):
            log.write(b"lost or not\n")
    log.write(b"recorded\n")
    assert (tmp_path / "log").read_text().endswith(" recorded\n")


def test_half_a_record_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = shim.LogFile(str(tmp_path / "log"), 1000)
    log.write(b"first\n")
    whole = os.write
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", lambda fd, data: whole(fd, data[:10]))  # room for ten bytes
        log.write(b"lost\n")
    log.write(b"recorded\n")
    assert printed(tmp_path / "log") == ["first", "recorded"]


async def attachable(tmp_path: Path, mark: str, given: ContainerInput, *argv: str) -> ShimmedProcess:
    command = HostCommand(argv=argv, env={"PATH": os.environ["PATH"], MARK: mark}, cwd=str(tmp_path))
    return await ShimmedProcesses().start(
        command, directory=tmp_path / "0", log_path=tmp_path / "0.log", attach=given
    )


@contextlib.contextmanager
def attached(tmp_path: Path, wish: bytes) -> Iterator[tuple[socket.socket, int | None]]:
    """A client of the shim, and the descriptor that it gets."""
    with contextlib.chdir(tmp_path / "0"), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(ATTACH_SOCKET)
        client.sendall(wish)
        _, descriptors, _, _ = socket.recv_fds(client, 1, 1)
        try:
            yield client, descriptors[0] if descriptors else None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def read_all(client: socket.socket) -> bytes:
    received = b""
    while data := client.recv(1000):
        received += data
    return received


@pytest.mark.parametrize("once", [True, False], ids=["once", "again and again"])
async def test_the_input_ends_with_that_of_the_first_client_if_it_is_for_one(
    tmp_path: Path, mark: str, once: bool
) -> None:
    process = await attachable(tmp_path, mark, ContainerInput(stdin=True, once=once), "sh", "-c", "cat; echo end")
    for word in (b"one\n",) if once else (b"one\n", b"two\n"):
        with attached(tmp_path, b"i") as (client, given):
            assert given is not None
            os.write(given, word)
            assert client.recv(100) == word
    if once:
        await process.wait()
        assert output(tmp_path) == ["one", "end"]
    else:
        process.kill()
        await process.wait()
        assert output(tmp_path) == ["one", "two"]


async def test_a_container_without_input_gives_none(tmp_path: Path, mark: str) -> None:
    process = await attachable(
        tmp_path, mark, ContainerInput(), "sh", "-c", "until [ -e go ]; do sleep 0.02; done; cat; echo end"
    )
    with attached(tmp_path, b"o") as (client, given):
        assert given is None
        (tmp_path / "go").touch()
        assert read_all(client) == b"end\n"
    assert (await process.wait()).exit_code == 0


async def test_a_container_has_a_terminal(tmp_path: Path, mark: str) -> None:
    script = 'tty >/dev/null && read x && stty size && echo "<$x>"'
    process = await attachable(tmp_path, mark, ContainerInput(stdin=True, tty=True), "sh", "-c", script)
    with attached(tmp_path, b"i") as (client, terminal):
        assert terminal is not None
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 70, 0, 0))
        os.write(terminal, b"word\n")
        assert read_all(client).split() == [b"word", b"20", b"70", b"<word>"]
    assert (await process.wait()).exit_code == 0


async def test_a_client_that_does_not_read_holds_nothing_up(tmp_path: Path, mark: str) -> None:
    script = "until [ -e go ]; do sleep 0.02; done; head -c 5000000 /dev/zero | tr '\\0' x; echo"
    process = await attachable(tmp_path, mark, ContainerInput(), "sh", "-c", script)
    with attached(tmp_path, b"o") as (_, _):
        (tmp_path / "go").touch()
        assert (await asyncio.wait_for(process.wait(), 20)).exit_code == 0
