"""Runs scripts of examples/ports, one after the other, in one world.

test_ports.py runs it as ranks. RANK_SETTINGS comes from the test: for each run, the script, its settings, the folder
in which it has its commits and writes its result, and after which step what happens.
"""

import contextlib
import json
import os
import signal
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402

import spottrain  # noqa: E402
from ported_scripts import PortedScript  # noqa: E402
from sessions_in_one_world import run_sessions  # noqa: E402
from spottrain.loop.boundary import Boundary  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise its engine compiles it
os.environ["ACCELERATE_USE_CPU"] = "1"  # gloo, for scripts that take what there is
torch.set_num_threads(1)
warnings.filterwarnings("ignore")


class Lost(SystemExit):
    """The rank ends without a notice."""


@contextlib.contextmanager
def happening(event: str, after: int) -> Iterator[None]:
    """What happens to all ranks after so many steps: a notice, or a loss without one."""
    cross = Boundary.cross

    def crossing(boundary: Boundary, step: int, **how: Any) -> None:
        cross(boundary, step, **how)
        if step == after and event == "notice":
            os.kill(os.getpid(), signal.SIGTERM)
        elif step == after:
            if boundary._saver.checkpointer is not None:
                boundary._saver.checkpointer.settle()  # what was to be committed before
            raise Lost

    with patch.object(Boundary, "cross", crossing) if event else contextlib.nullcontext():
        yield


def run(name: str, *, folder: str, form: str, event: str = "", after: int = 0, **settings: Any) -> None:
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    script = PortedScript.of(name)
    session = partial(
        spottrain.session, checkpoint_uri=f"file://{folder}/commits", checkpoint_interval="2steps", **settings
    )
    try:
        with patch.dict(os.environ), patch.object(spottrain, "session", session), happening(event, after):
            code = compile(getattr(script, form), str(script.path), "exec")
            exec(code, {"__name__": "__main__"})
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        if form == "plain" and dist.is_initialized():
            dist.destroy_process_group()


if RANK_SETTINGS["runs"][0]["form"] == "plain":
    errors = {}
    for each in RANK_SETTINGS["runs"]:
        run(**each)
else:
    errors = run_sessions(
        (f"{each['name']}: {each['folder']}", partial(run, **each)) for each in RANK_SETTINGS["runs"]
    )
Path(f"{RANK_SETTINGS['result']}-{os.environ['RANK']}").write_text(json.dumps(errors))
