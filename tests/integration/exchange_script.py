"""The script that test_exchange_ranks.py runs as ranks.

RANK_SETTINGS comes from the test. Each rank writes what it received as JSON. At the end, rank 0 plays an attacker: it
sends pickles to ranks that expect what ranks exchange.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])

import torch.distributed as dist  # noqa: E402
from pydantic import TypeAdapter  # noqa: E402

from spottrain import exchange  # noqa: E402
from spottrain.checkpoint.collectives import Collectives  # noqa: E402
from spottrain.checkpoint.errors import CheckpointError, Fenced, ObjectNotFound, StorageUnavailable  # noqa: E402
from spottrain.world.launch import gloo_group  # noqa: E402

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER = Path(RANK_SETTINGS["folder"])
VALUES = [{"größe": [1, None, 2.5]}, "", ["x" * 100_000]]


class _OfStore(StorageUnavailable):
    """A store's own error, which the other ranks don't know."""


class Evil:
    """Leaves a file behind when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (FOLDER / "executed",)


def raised_by(work: Any) -> list[Any]:
    try:
        work()
    except CheckpointError as error:
        return [type(error).__name__, str(error), getattr(error, "fence", None)]
    return []


def fail(error: CheckpointError, rank: int) -> None:
    if rank == RANK:
        raise error


dist.init_process_group("gloo")
group = gloo_group()
ranks = Collectives(group, RANK)
found = {
    "all_gather": exchange.all_gather(VALUES[RANK], group),
    "gather": exchange.gather(VALUES[RANK], group),
    "broadcast": exchange.broadcast(VALUES[RANK]),
    "scatter": exchange.scatter(VALUES if RANK == 0 else None, group),
    "union": sorted(ranks.union({"a", str(RANK)})),
    "from rank 0": ranks.from_rank_0(lambda: (RANK, "a"), TypeAdapter(tuple[int, str])),
    "fenced": raised_by(lambda: ranks.from_rank_0(lambda: fail(Fenced("A newer one.", 7), 0), TypeAdapter(None))),
    "of one": raised_by(lambda: ranks.together(lambda: fail(ObjectNotFound("HEAD"), 2))),
    "of a store": raised_by(lambda: ranks.together(lambda: fail(_OfStore("It hangs."), 1))),
}
(FOLDER / f"{RANK}.json").write_text(json.dumps(found))

# On the wire, these are the collectives of exchange.broadcast.
attack = partial(dist.broadcast_object_list, [Evil()], group=group, group_src=0)
if RANK == 0:
    attack()
else:
    try:
        exchange.broadcast(None, group)
    except ValueError:
        executed = (FOLDER / "executed").exists()
        (FOLDER / f"refused-{RANK}").write_text(f"executed: {executed}")
dist.barrier()
attack()  # which runs the code in ranks that unpickle
dist.barrier()
dist.destroy_process_group()
