"""Loops as people write them, one session after the other, each drained and resumed by the next world.

test_loops.py runs it as ranks. RANK_SETTINGS comes from the test: the cases, and where each has its commits. Rank 0
of the last world saves what each case has trained. All ranks write what they were refused.
"""

import json
import os
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])

import torch  # noqa: E402

import spottrain  # noqa: E402
from people_loops import LOOPS  # noqa: E402
from sessions_in_one_world import run_sessions  # noqa: E402
from spottrain_api.settings.training import DeepSpeedConfig  # noqa: E402

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
RANK = int(os.environ["RANK"])
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "zero 1": {"strategy": "deepspeed", "deepspeed": DeepSpeedConfig(zero_stage=1)},
    "zero 3": {"strategy": "deepspeed", "deepspeed": DeepSpeedConfig(zero_stage=3)},
}


def run(name: str) -> None:
    """One session, which ends with SystemExit if it drains or is refused."""
    kind, engine = name.split(": ")
    loop = LOOPS[kind]
    settings = ENGINES[engine]
    with spottrain.session(
        global_batch=loop.global_batch,
        micro_batch=loop.micro_batch,
        strategy=settings["strategy"],
        checkpoint_uri=f"file://{RANK_SETTINGS['folder']}/{name}",
        checkpoint_interval="100steps",
    ) as session:
        session.config = session.config.model_copy(update={k: v for k, v in settings.items() if k != "strategy"})
        trained = loop.train(session, lambda: os.kill(os.getpid(), signal.SIGTERM))
        if RANK == 0:
            torch.save(trained, f"{RANK_SETTINGS['folder']}/{name}.pt")


errors = run_sessions((name, partial(run, name)) for name in RANK_SETTINGS["cases"])
Path(f"{RANK_SETTINGS['result']}-{RANK}").write_text(json.dumps(errors))
