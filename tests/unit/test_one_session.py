"""A session belongs to the process that was started for it, and none of its children opens another."""

from __future__ import annotations

import os
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import spottrain
from forked_programs import run_forked
from spottrain.checkpoint.errors import SaveFailed

SCRIPT = """
import multiprocessing, sys
import torch
import spottrain
from spottrain.checkpoint.errors import SaveFailed

loader = {"multiprocessing_context": sys.argv[1]} if len(sys.argv) > 1 else {}
multiprocessing.set_start_method("forkserver", force=True)  # the default of Python 3.14
print(f"started as {__name__}", flush=True)
with spottrain.session(strategy="ddp", global_batch=2, micro_batch=2) as session:
    training = session.prepare(
        torch.nn.Linear(1, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=torch.utils.data.TensorDataset(torch.ones(8, 1)),
        num_workers=1,
        loader=loader,
    )
    for step in training.steps(total=2):
        for (batch,) in step.micro_batches():
            step.backward(training.model(batch).sum())
        step.update()
print("done")
"""


def run_script(fork: Any, folder: Path, *arguments: str) -> CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return run_forked(fork, script, *arguments)


def test_data_workers_fork_whatever_the_default_start_method(fork: Any, tmp_path: Path) -> None:
    ended = run_script(fork, tmp_path)
    assert (ended.returncode, ended.stdout.splitlines()) == (0, ["started as __main__", "done"]), ended.stderr


def test_a_worker_that_runs_the_script_again_ends_with_a_sentence(fork: Any, tmp_path: Path) -> None:
    ended = run_script(fork, tmp_path, "spawn")
    assert ended.returncode == 1
    assert ended.stdout.splitlines() == ["started as __main__", "started as __mp_main__"]
    assert "put what the script does under 'if __name__ == \"__main__\":'".replace("'", "") in ended.stderr.replace(
        "'", ""
    )


@pytest.mark.usefixtures("world_of_its_own")
def test_a_process_that_a_rank_has_forked_opens_none(capfd: pytest.CaptureFixture[str]) -> None:
    with spottrain.session(strategy="ddp", global_batch=1, micro_batch=1):
        child = os.fork()
        if child == 0:
            code = 0
            try:
                with spottrain.session(strategy="ddp", global_batch=1, micro_batch=1):
                    pass
            except SystemExit as ended:
                code = int(str(ended.code))
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert "was started by a rank" in capfd.readouterr().err


@pytest.mark.usefixtures("world_of_its_own")
def test_an_error_of_a_checkpoint_that_leaves_the_session_is_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), spottrain.session(strategy="ddp", global_batch=1, micro_batch=1):
        raise SaveFailed("The store is gone. Create it.")
    said = capfd.readouterr().err
    assert "spottrain: The store is gone. Create it." in said
    assert "Traceback" not in said
