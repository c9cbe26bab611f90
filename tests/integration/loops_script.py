"""Loops as people write them, one session after the other, each drained and resumed by the next world.

test_loops.py runs it as ranks. RANK_SETTINGS comes from the test: the cases, and where each has its commits. Rank 0
of the last world saves what each case has trained. All ranks write what they were refused.
"""

import json
import os
import signal
import traceback
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import spottrain  # noqa: E402
import spottrain.loop.session as session_module  # noqa: E402
from people_loops import LOOPS  # noqa: E402
from spottrain.world.launch import Groups, Launch, join_world  # noqa: E402
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


def main() -> dict[str, dict[str, str]]:
    """By case, the sentence with which it was refused, or a traceback."""
    groups: dict[str, Groups] = {}
    found: dict[str, dict[str, str]] = {}

    def join_once(launch: Launch) -> Groups:
        return groups.setdefault("all", groups.get("all") or join_world(launch))

    def said(_: object, sentence: str) -> None:
        found[name] = {"refused": sentence}

    # All sessions are in one world, which takes longer to join than a session takes.
    with (
        patch.object(session_module, "join_world", join_once),
        patch.object(dist, "destroy_process_group"),
        patch("spottrain.loop.entry.logs.say", said),
    ):
        for name in RANK_SETTINGS["cases"]:
            try:
                run(name)
            except SystemExit:  # after a drain, or after a sentence
                pass
            except BaseException:
                found[name] = {"error": traceback.format_exc()}
                break  # the other ranks may be in another collective by now
    return found


errors = main()
Path(f"{RANK_SETTINGS['result']}-{RANK}").write_text(json.dumps(errors))
