"""Loops of a script's own whose ranks differ, one session after the other.

test_attach_ranks.py runs it as ranks. RANK_SETTINGS comes from the test. Each rank writes what it was refused.
"""

import json
import os
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.distributed_c10d import _get_default_store  # noqa: E402

import spottrain  # noqa: E402
from sessions_in_one_world import run_sessions  # noqa: E402

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
RANK = int(os.environ["RANK"])


def go_ahead(session: spottrain.Session) -> None:
    """Rank 1 is through with the boundary of each step before rank 0 begins its own."""
    run = session.attach(total=4, model=nn.Linear(2, 2))
    run.boundary()
    while run.step < run.total - 1:  # the last one commits, for which they wait
        name = f"passed/{run.step + 1}"
        if RANK == 0:
            _get_default_store().wait([name], timedelta(seconds=60))
        run.boundary(0.5)
        if RANK == 1:
            _get_default_store().set(name, "")
    run.boundary()


CASES = {"a rank ahead": go_ahead}


def run(name: str) -> None:
    with spottrain.session(strategy="ddp", checkpoint_uri=f"file://{RANK_SETTINGS['folder']}/{name}") as session:
        CASES[name](session)


found = run_sessions((name, partial(run, name)) for name in CASES)
Path(f"{RANK_SETTINGS['result']}-{RANK}").write_text(json.dumps(found))
