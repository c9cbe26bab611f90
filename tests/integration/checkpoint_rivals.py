"""One of several writers that save the same steps at the same time.

test_checkpoint_rivals.py runs it. RIVAL comes from the test: the store, this writer's generation, where to meet the
others, and where to write the outcome of each round.
"""

import json
import os
from pathlib import Path
from typing import Any

RIVAL: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RIVAL["environment"])

import torch  # noqa: E402

from spottrain.checkpoint.checkpointer import Checkpointer  # noqa: E402
from spottrain.checkpoint.errors import Fenced, StepBehind  # noqa: E402
from spottrain.checkpoint.format.head import read_head  # noqa: E402
from spottrain.checkpoint.saving.retention import Retention  # noqa: E402
from spottrain.checkpoint.stores.uri import open_storage  # noqa: E402

torch.set_num_threads(1)
meet = RIVAL["barrier"].wait
storage = open_storage(RIVAL["uri"], endpoint_url=RIVAL["endpoint_url"])
saver = Checkpointer(storage, generation=RIVAL["generation"], attempt_id=RIVAL["name"], rank=0, world_size=1)
if RIVAL["generation"] == 1:
    saver.latest()
meet(60)
if RIVAL["generation"] == 2:
    saver.latest()  # from here on, generation 1 is fenced
outcomes: list[tuple[str, str]] = []
for step in range(1, RIVAL["rounds"] + 1):
    meet(60)
    try:
        saver.save({"w": torch.full((5,), float(step))}, step=step)
        outcome = "won"
    except (StepBehind, Fenced) as error:
        outcome = type(error).__name__
    meet(60)
    head = read_head(storage)
    assert head is not None
    assert head.newest is not None
    assert head.newest.step == step
    outcomes.append((outcome, head.newest.attempt))
    # Who has not resumed from another's commit is fenced by it.
    saver.load(lambda _: {"w": torch.zeros(5)}, head.newest)
    if outcome == "won" and step % 20 == 0:
        saver.clean_up(Retention())
Path(RIVAL["outcomes"]).write_text(json.dumps(outcomes))
