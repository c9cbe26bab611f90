"""A rank with a writer process beside it, for test_checkpoint_writer.py.

RANK_SETTINGS comes from the test.
"""

import contextlib
import json
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]

import torch  # noqa: E402

from spottrain.checkpoint.checkpointer import Checkpointer  # noqa: E402
from spottrain.checkpoint.errors import CheckpointError, StorageError  # noqa: E402
from spottrain.checkpoint.saving.writer import WriterProcess  # noqa: E402
from spottrain.checkpoint.stores.storage import CheckpointStorage  # noqa: E402
from spottrain.checkpoint.stores.uri import open_storage  # noqa: E402
from spottrain_agent.processes import is_alive  # noqa: E402

URI, ENDPOINT = SETTINGS["uri"], SETTINGS["endpoint_url"]
torch.set_num_threads(1)
listening = socket.create_server(("127.0.0.1", 0))  # which the writer must not hold
writer = WriterProcess.fork()
os.environ.update(SETTINGS["environment"])  # after the fork, as a script may
writer.connect(URI, ENDPOINT)


def state(step: int) -> dict[str, Any]:
    """Of different sizes, so that the staging memory has to grow."""
    return {"model": {"w": torch.arange(step * 3_000_000, dtype=torch.float32), "empty": torch.empty(0)}}


def checkpointer(storage: CheckpointStorage | None = None) -> Checkpointer:
    storage = storage or open_storage(URI, endpoint_url=ENDPOINT)
    found = Checkpointer(storage, generation=1, attempt_id="a", rank=0, world_size=1, writer=writer)
    found.latest()
    return found


def without_uploads(storage: CheckpointStorage) -> CheckpointStorage:
    """A store that takes no shards from this process."""
    upload = storage.upload

    def refuse(key: str, data: Any) -> None:
        assert not key.endswith(".data"), "the rank writes itself"
        upload(key, data)

    storage.upload = refuse  # type: ignore[method-assign]
    return storage


def open_files(pid: int) -> dict[str, str]:
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing itself
            found[name] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found


def save() -> dict[str, Any]:
    """Save twice in the background and once at the end.

    The result says which files rank and writer hold then.
    """
    saver = checkpointer(without_uploads(open_storage(URI, endpoint_url=ENDPOINT)))
    before = len(open_files(os.getpid()))
    for step in (1, 2, 3):
        save = saver.save_in_background if step < 3 else saver.save
        handle = save(state(step), step=step)
        assert handle is not None
        handle.wait()
    held = sorted(path for number, path in open_files(writer.pid).items() if int(number) > 2)
    grown = len(open_files(os.getpid())) - before
    return {"held": held, "grown": grown}


def prepare() -> dict[str, Any]:
    """What the writer has ready before it writes.

    That is how much of the rank's memory it has mapped, and whether it is connected to the store.
    """
    saver = checkpointer()
    before = len(sockets(writer.pid))
    saver.prepare(state(1))
    mapped, give_up_at = 0, time.monotonic() + 30
    while not (mapped and (SETTINGS["is_folder"] or len(sockets(writer.pid)) > before)):
        assert time.monotonic() < give_up_at, open_files(writer.pid)
        mapped = mapped_staging(writer.pid)
        time.sleep(0.01)
    return {"mapped": mapped, "connected": len(sockets(writer.pid)) > before}


def sockets(pid: int) -> list[str]:
    return [path for path in open_files(pid).values() if path.startswith("socket:")]


def mapped_staging(pid: int) -> int:
    """Bytes of staging memory that a process has mapped."""
    lines = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "spottrain-staging" in line]
    bounds = [line.split()[0].split("-") for line in lines]
    return sum(int(end, 16) - int(begin, 16) for begin, end in bounds)


def lose() -> dict[str, Any]:
    """Both saves after the writer's death are committed.

    The writer is killed before the second save. The third follows.
    """
    saver = checkpointer()
    saver.save(state(1), step=1)
    os.kill(writer.pid, signal.SIGKILL)
    commits = [saver.save(state(1), step=step) for step in (2, 3)]
    return {"commits": [handle.commit.step for handle in commits if handle.commit is not None]}


def fail() -> dict[str, Any]:
    """The writer hands an error of the store to its rank, and lives on.

    The rank gets the error that it would have had itself.
    """
    writer.connect(SETTINGS["missing_uri"], ENDPOINT)
    saver, found = checkpointer(), {}
    try:
        saver.save(state(1), step=1)
    except StorageError as error:
        found = {"error": type(error).__name__, "message": str(error)}
    writer.connect(URI, ENDPOINT)
    handle = saver.save(state(1), step=2)
    assert handle.commit is not None
    return found | {"commit": handle.commit.step}


class Interrupted(BaseException):
    """Raised by a signal's handler, as KeyboardInterrupt is."""


def interrupt() -> dict[str, Any]:
    """The rank gives its writer up if a handler raises while it waits for it.

    Otherwise the writer would answer the next request with the answer to this one.
    """

    def handle(*_: object) -> None:
        raise Interrupted

    connection = writer._connection
    receive = connection.recv

    def receive_until_the_alarm() -> Any:
        signal.setitimer(signal.ITIMER_REAL, 0.2)  # not before: staging may take longer
        return receive()

    saver = checkpointer()
    signal.signal(signal.SIGALRM, handle)
    os.kill(writer.pid, signal.SIGSTOP)
    connection.recv = receive_until_the_alarm  # type: ignore[method-assign]
    interrupted = False
    try:
        saver.save(state(1), step=1)
    except Interrupted:
        interrupted = True
    saver.save(state(2), step=2)
    newest = saver.latest(verify=True)
    assert newest is not None
    return {"interrupted": interrupted, "commit": newest.step, "writer": is_alive(writer.pid)}


def starve() -> dict[str, Any]:
    """The rank has no descriptor left for a save.

    A fork of it holds its end of the connection.
    """
    saver = checkpointer()
    saver.save(state(1), step=1)
    child = os.fork()
    if child == 0:
        signal.pause()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, open_files(os.getpid()))) + 1, hard))
    holes = []
    with contextlib.suppress(OSError):
        while True:
            holes.append(os.open("/dev/null", os.O_RDONLY))
    failed = False
    try:
        saver.save(state(1), step=2)
    except CheckpointError:
        failed = True
    for hole in holes:
        os.close(hole)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    handle = saver.save(state(1), step=3)
    os.kill(child, signal.SIGKILL)
    assert handle.commit is not None
    return {"failed": failed, "commit": handle.commit.step}


def change() -> dict[str, Any]:
    """The writer writes what was staged, whatever becomes of the buffer.

    Here the buffer grows meanwhile.
    """
    saver = checkpointer()
    handle = saver.save_in_background(state(1), step=1)
    assert handle is not None
    saver.prepare(state(3))
    handle.wait()
    into = state(1)
    into["model"]["w"].zero_()
    newest = saver.latest(verify=True)
    assert newest is not None
    saver.load(lambda _: into, newest)
    return {"same": torch.equal(into["model"]["w"], state(1)["model"]["w"])}


def die() -> dict[str, Any]:
    """The rank is killed; the test looks for its writer."""
    Path(SETTINGS["found"]).write_text(json.dumps({"pid": writer.pid}))
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    scenario.__name__: scenario for scenario in (save, prepare, lose, fail, interrupt, starve, change, die)
}
logging.basicConfig(filename=SETTINGS["log"])
Path(SETTINGS["found"]).write_text(json.dumps(SCENARIOS[SETTINGS["scenario"]]()))
