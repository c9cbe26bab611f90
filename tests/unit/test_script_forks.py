"""A process that a script forks may end in any way: only the rank's end counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forked_programs import run_forked
from spottrain_api.contract.configuration import TrainerConfig
from spottrain_api.contract.names import ENV_RUN_DIR, FILE_RUN
from spottrain_api.settings.training import Batch

# Forks a rank as torchrun does.
LAUNCHER = """
import multiprocessing, pathlib, sys
from spottrain_agent.worker import Console, run_worker
from spottrain_api.settings.entrypoint import Entrypoint
folder = pathlib.Path(sys.argv[1])
program = Entrypoint(script=str(folder / "train.py"), args=(str(folder),))
arguments = (program, folder, Console.redirect(folder / "torchrun.log"))
rank = multiprocessing.get_context("fork").Process(target=run_worker, args=arguments)
rank.start()
rank.join()
sys.exit(rank.exitcode)
"""
SCRIPT = """
import os, pathlib, sys

def fork(end):
    helper = os.fork()
    if helper == 0:
        end()
    exit_code = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    ends = [*folder.glob("ended-*"), *folder.glob("outcome-*")]
    print(exit_code, [path.name for path in ends], flush=True)

def fork_some():
    fork(sys.exit)
    fork(lambda: sys.exit(3))
    fork(lambda: 1 / 0)

folder = pathlib.Path(sys.argv[1])
"""
PLAIN = "fork_some()"
IN_SESSION = "import spottrain\nwith spottrain.session():\n    fork_some()"
LEAVES_SESSION = """
import spottrain
rank = os.getpid()
with spottrain.session():
    helper = os.fork()
    if os.getpid() == rank:
        os.waitpid(helper, 0)
        fork_some()
"""


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(PLAIN, id="plain"),
        pytest.param(IN_SESSION, id="in a session", marks=pytest.mark.nightly),
        pytest.param(LEAVES_SESSION, id="leaves a session"),
    ],
)
def test_the_end_of_a_process_that_the_script_forks_is_not_the_ranks(place: str, fork: Any, tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "train.py").write_text(SCRIPT + place)
    TrainerConfig(job="job", generation=1, attempt_id="g1", batch=Batch(global_=1)).write(tmp_path / FILE_RUN)
    environment = {"LOCAL_RANK": "0", ENV_RUN_DIR: str(tmp_path)}
    done = run_forked(fork, tmp_path / "launcher.py", str(tmp_path), environment=environment)
    assert (done.returncode, done.stdout) == (0, "0 []\n3 []\n1 []\n"), done.stderr
    assert (tmp_path / "ended-0.json").exists()
