"""Kill a saving process at random moments, again and again; test_checkpoint_kills.py starts it.

Arguments: storage URI, rounds, longest time in seconds from a commit to the kill. One import
of torch serves all the rounds: each forks a writer, kills it, and looks at what it left.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import Any

import torch

from spottrain.checkpoint import Checkpointer, Commit, Retention, open_storage


def checkpointer(uri: str, generation: int) -> Checkpointer:
    return Checkpointer(
        open_storage(uri, endpoint_url=os.environ.get("TEST_ENDPOINT")),
        generation=generation,
        attempt_id="kill",
        rank=0,
        world_size=1,
        retention=Retention(last=2),
    )


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((300_000,), float(step))}, "step": step}


def resume(saver: Checkpointer) -> int:
    """The step of the newest commit, every value of which is right; 0 without one."""
    newest: Commit | None = saver.latest(verify=True)
    if newest is None:
        return 0
    assert newest == saver.latest(), "the newest commit is damaged"
    into = state(0)
    saver.load(into, newest)
    assert into["step"] == newest.step
    assert torch.equal(into["model"]["w"], state(newest.step)["model"]["w"])
    return newest.step


def write_until_killed(uri: str, generation: int, acknowledged: int) -> None:
    saver = checkpointer(uri, generation)
    step = resume(saver)
    os.write(acknowledged, b"r")
    while True:
        step += 1
        handle = saver.save(state(step), step=step, asynchronous=step % 2 == 0, wait=True)
        assert handle is not None
        handle.wait()
        os.write(acknowledged, b"c")
        saver.cleanup(keep_last=2)


def one_round(uri: str, generation: int, commits_first: int, then_seconds: float) -> tuple[int, int]:
    """Commits acknowledged before the kill, and the step that is there after it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            write_until_killed(uri, generation, writer)
        finally:
            os._exit(1)
    os.close(writer)
    first = os.read(reader, 1)
    assert first == b"r", "the writer could not resume"
    acknowledged = sum(len(os.read(reader, 1)) for _ in range(commits_first))
    time.sleep(then_seconds)  # the random moment of the kill
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while data := os.read(reader, 4096):
        acknowledged += len(data)
    os.close(reader)
    return acknowledged, resume(checkpointer(uri, generation + 1))


def main() -> None:
    uri, rounds, longest = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    moments = random.Random(7)
    step = 0
    for number in range(rounds):
        acknowledged, found = one_round(uri, 2 * number + 1, moments.randint(0, 2), moments.uniform(0, longest))
        # What was acknowledged is there; at most one more commit was made without having been.
        assert found - step - acknowledged in (0, 1), (number, step, acknowledged, found)
        step = found
    assert step >= rounds // 2
    print(f"{rounds} kills, {step} commits")


if __name__ == "__main__":
    main()
