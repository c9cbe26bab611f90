"""SIGKILL a process at each of its operations on a store, in turn.

test_checkpoint_kills.py starts this script. Its arguments are the storage URI, the number of points (0: every
point), and a seed.

One import of torch serves all points. Each point forks a rank, with a writer process beside it. The rank resumes,
saves, commits and cleans up until it is killed. The script then looks at what the rank left. At every other point, it
kills only the process that has come there, so a rank goes on without its writer. The last line of the output is the
count, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kill_point import SECONDS_INTO, KillPoint
from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.format.attempt import ATTEMPTS
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.format.manifest import FROZEN_SUFFIX
from spottrain.checkpoint.saving.retention import Retention
from spottrain.checkpoint.saving.writer import WriterProcess
from spottrain.checkpoint.stores.storage import CheckpointStorage
from spottrain.checkpoint.stores.uri import open_storage
from spottrain_runtime.processes import become_subreaper

# Large enough for several parts on object stores, and small.
SIZES = (2_300_000, 1_000)
FROZEN, FROZEN_SIZE = {"model.frozen"}, 300_000
SAVES = 3
ENDPOINT = os.environ.get("TEST_ENDPOINT") or None
KEEP = Retention(last=2, every=50)


@dataclass(slots=True, kw_only=True)
class Count:
    """Points at which a process was killed, and what came of it."""

    points: int = 0
    in_writer: int = 0
    commits: int = 0
    torn: int = 0
    lost: int = 0
    left_over: int = 0
    wrongly_kept: int = 0
    most_saves_redone: int = 0


def checkpointer(storage: CheckpointStorage, generation: int, writer: WriterProcess | None = None) -> Checkpointer:
    return Checkpointer(
        storage,
        generation=generation,
        attempt_id="kill",
        rank=0,
        world_size=1,
        retention=KEEP,
        writer=writer,
    )


def state(step: int) -> dict[str, Any]:
    weights = torch.full((SIZES[step % SAVES != 1],), float(step))
    return {"model": {"w": weights, "frozen": torch.arange(FROZEN_SIZE)}, "step": step}


def resume(saver: Checkpointer) -> int:
    """The step of the newest commit, every value of which is right; 0 without one.

    What is frozen is loaded as if it were trained: the next save writes it once more, and those after that refer to
    it.
    """
    newest = saver.latest()
    if newest is None:
        return 0
    into = state(newest.step)
    for tensor in into["model"].values():
        tensor.zero_()
    saver.load(lambda _: into, newest)
    assert into["step"] == newest.step
    for name, tensor in state(newest.step)["model"].items():
        assert torch.equal(into["model"][name], tensor)
    return newest.step


def save(storage: CheckpointStorage, generation: int, writer: WriterProcess, acknowledged: int) -> None:
    """Resume, and save three times.

    Two saves are in the background and the last one is not. A clean-up follows.
    """
    saver = checkpointer(storage, generation, writer)
    step = resume(saver)
    for number in range(1, SAVES + 1):
        save = saver.save_in_background if number < SAVES else saver.save
        handle = save(state(step + number), step=step + number, frozen=FROZEN)
        assert handle is not None
        handle.wait()
        os.write(acknowledged, b"c")
    saver.clean_up(KEEP)


def run_rank(uri: str, storage: CheckpointStorage, generation: int, point: KillPoint) -> tuple[int, int]:
    """Fork a rank, and count its commits and operations.

    Returns:
        How many commits the rank could still acknowledge, and how many operations it and its writer made, if nobody
        killed it.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            point.arm()
            writer = WriterProcess.fork()
            writer.connect(uri, ENDPOINT)
            save(storage, generation, writer, writes)
            writer.close()
            os.write(writes, point.operations.to_bytes(4))
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        said = pipe.read()
    with contextlib.suppress(ChildProcessError):
        while os.wait():  # for the writer, too, which outlives its rank by a moment
            pass
    acknowledged = len(said) - len(said.lstrip(b"c"))
    return acknowledged, int.from_bytes(said[acknowledged:])


def left_over(storage: CheckpointStorage) -> int:
    """Objects and unfinished uploads that belong to no kept commit."""
    head = read_head(storage)
    assert head is not None
    kept = tuple(commit.attempt for commit in head.commits)
    needed = tuple(attempt for commit in head.commits for attempt in commit.needs)
    stray = [
        key
        for key, _ in storage.list(ATTEMPTS)
        if not key.startswith(kept) and not (key.startswith(needed) and key.endswith(FROZEN_SUFFIX))
    ]
    return len(stray) + storage.abandon_uploads(ATTEMPTS, lambda key: True)


def wrongly_kept(storage: CheckpointStorage) -> int:
    """The number of commits that only HEAD names or only retention keeps.

    Every step was committed once.
    """
    head = read_head(storage)
    assert head is not None
    assert head.newest is not None
    steps = range(1, head.newest.step + 1)
    kept = {*steps[-KEEP.last :], *(step for step in steps if KEEP.every and step % KEEP.every == 0)}
    return len(kept ^ {commit.step for commit in head.commits})


def kill_points(operations: int, wanted: int, draw: random.Random) -> Iterator[tuple[int, float]]:
    """Points at each operation and into each, or `wanted` of them.

    These are evenly spread, from one on that is drawn.
    """
    # Google's client needs fewer requests: more moments of each.
    moments = (0.0, SECONDS_INTO) if operations >= 100 else (0.0, SECONDS_INTO / 2, SECONDS_INTO, 2 * SECONDS_INTO)
    points = [(number, into) for number in range(1, operations + 1) for into in moments]
    stride = max(1, len(points) // wanted) if wanted else 1
    yield from points[draw.randrange(stride) :: stride]


def main() -> None:
    uri, wanted, draw = sys.argv[1], int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)
    become_subreaper()
    # Two clients: ranks inherit one that has no connection open.
    mine, theirs = (open_storage(uri, endpoint_url=ENDPOINT) for _ in range(2))
    point = KillPoint(uri)
    step, operations = run_rank(uri, theirs, 1, point)
    assert step == SAVES
    count = Count()
    for generation, (point.kill_at, point.seconds_into) in enumerate(kill_points(operations, wanted, draw), start=1):
        point.spares_rank = generation % 2 == 0
        acknowledged, _ = run_rank(uri, theirs, 2 * generation, point)
        survivor = checkpointer(mine, 2 * generation + 1)
        count.points += 1
        count.in_writer += point.in_writer
        try:
            found = resume(survivor)
        except Exception as error:
            print(f"torn at {point.kill_at} + {point.seconds_into} s: {error!r}")
            count.torn += 1
            return
        # What was acknowledged is there; at most the commit after it was made without having been.
        if found - step not in (acknowledged, acknowledged + 1):
            print(f"lost at {point.kill_at} + {point.seconds_into} s: {step} + {acknowledged}, found {found}")
            count.lost += 1
        count.commits += found - step
        count.most_saves_redone = max(count.most_saves_redone, step + acknowledged - found + 1)
        step = found
        survivor.clean_up(KEEP)
        count.left_over += left_over(mine)
        count.wrongly_kept += wrongly_kept(mine)
    print(json.dumps(asdict(count) | {"operations": operations}))


if __name__ == "__main__":
    main()
