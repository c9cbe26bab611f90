"""Loops of scripts' own, most of them with ranks that differ, one session after the other.

test_attach_ranks.py runs it as ranks. RANK_SETTINGS comes from the test. Each rank writes what it was refused.
"""

import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.distributed_c10d import _get_default_store  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate  # noqa: E402

import spottrain  # noqa: E402
from sessions_in_one_world import run_sessions  # noqa: E402
from spottrain.checkpoint.format.head import read_head  # noqa: E402
from spottrain.checkpoint.stores.uri import open_storage  # noqa: E402
from spottrain.loop import stopping  # noqa: E402
from spottrain.world import listener  # noqa: E402
from spottrain_api.contract.configuration import DrainRequest, TrainerConfig  # noqa: E402
from spottrain_api.contract.names import FILE_RUN  # noqa: E402

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
RANK = int(os.environ["RANK"])


def session_of(name: str) -> AbstractContextManager[spottrain.Session]:
    """A session whose commits are in a folder of that name."""
    return spottrain.session(
        global_batch=4,
        micro_batch=2,
        strategy="ddp",
        checkpoint_uri=f"file://{RANK_SETTINGS['folder']}/{name}",
        checkpoint_interval="100steps",
    )


def go_ahead(name: str) -> None:
    """Rank 1 is through with the boundary of each step before rank 0 begins its own."""
    with session_of(name) as session:
        run = session.attach(total=4, model=nn.Linear(2, 2))
        run.boundary()
        while run.step < run.total - 1:  # the last one commits, for which they wait
            passed = f"passed/{run.step + 1}"
            if RANK == 0:
                _get_default_store().wait([passed], timedelta(seconds=60))
            run.boundary(0.5)
            if RANK == 1:
                _get_default_store().set(passed, "")
        run.boundary()


def loop(name: str, *, steps: int, data: range | None = None, parts: dict[str, Any] | None = None) -> None:
    """A loop of a script with data of its own, which a rank may have less of."""
    with session_of(name) as session:
        run = session.attach(total=steps, **({"counts": []} if parts is None else parts))
        for _ in range(run.step, steps) if data is None else data:
            run.boundary(1.0)


class _Said(logging.Handler):
    """Lets the other rank know that this one has said that it waits."""

    def emit(self, record: logging.LogRecord) -> None:
        if "Rank 1 has left the loop after step 2, before the last one, and waits" in record.getMessage():
            _get_default_store().set("waits", "")


def waited_for(name: str) -> None:
    """Both leave the loop after the same step, and rank 0 only after rank 1 has said that it waits."""
    logging.getLogger("spottrain").addHandler(_Said())
    with session_of(name) as session:
        run = session.attach(total=9, counts=[])
        run.boundary()
        run.boundary()
        if RANK == 0:
            _get_default_store().wait(["waits"], timedelta(seconds=60))


def caught(name: str) -> None:
    """Rank 1 catches an exception in one step, and goes on with the next one."""
    with session_of(name) as session:
        run = session.attach(total=9, counts=[])
        for batch in range(5):
            if (RANK, batch) == (1, 2):
                continue
            run.boundary(1.0)


def shared(name: str, *, prepares: bool, steps: int) -> None:
    """A part of a run, by session.prepare or by a loop of the script's own."""
    model = nn.Linear(2, 2)
    with session_of(name) as session:
        if prepares:
            training = session.prepare(
                model, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), dataset=[torch.ones(2)] * 4
            )
            for step in training.steps(total=steps):
                for batch in step.micro_batches():
                    step.backward(training.model(batch).square().mean())
                step.update()
            return
        model = session.spread(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = session.attach(total=steps, model=model, optimizer=optimizer)
        assert run.step == steps - 2, run.step
        while run.step < run.total:
            optimizer.zero_grad()
            model(torch.ones(4, 2)).square().mean().backward()
            optimizer.step()
            run.boundary()


def evaluated(name: str, *, by_epoch: bool) -> None:
    """A notice for rank 1 in an evaluation between two steps, which takes until the step is committed."""
    run_dir = Path(RANK_SETTINGS["folder"]) / f"{name}-{RANK}"
    run_dir.mkdir()
    uri = f"file://{RANK_SETTINGS['folder']}/{name}"
    job = {"job": name, "generation": 0, "attempt_id": "", "seed": 0, "strategy": "ddp"}
    more = {"batch": {"global": 4, "micro": 2}, "checkpoint": {"uri": uri, "interval": "100steps"}}
    TrainerConfig.model_validate(job | more).write(run_dir / FILE_RUN)
    with (
        patch.dict(os.environ, {"SPOTTRAIN_RUN_DIR": str(run_dir)}),
        patch.object(listener, "LISTEN_AFTER_SECONDS", 0.0),
        patch.object(stopping.Commits, "seconds_needed", lambda self, seconds_left: seconds_left),
        spottrain.session() as session,
    ):

        def evaluate() -> None:
            if RANK == 1:
                now = datetime.now(UTC)
                request = DrainRequest(reason="test", deadline=now + timedelta(seconds=60), requested_at=now)
                request.write(run_dir / "drain.json")
            storage = open_storage(uri)
            while (head := read_head(storage)) is None or head.newest is None:
                time.sleep(0.01)
            assert head.newest.step == 2

        if by_epoch:
            training = session.prepare(
                nn.Linear(2, 2),
                optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
                dataset=[torch.ones(2)] * 7,
            )
            for epoch in training.epochs(3):
                for step in epoch:
                    for batch in step.micro_batches():
                        step.backward(training.model(batch).square().mean())
                    step.update()
                with training.evaluation():
                    evaluate()
        else:
            run = session.attach(total=9, counts=[])
            run.boundary()
            run.boundary()
            with run.evaluation():
                evaluate()
            run.boundary()
        raise AssertionError("no drain")


def off_mesh() -> torch.Tensor:
    return DTensor.from_local(torch.zeros(2), DeviceMesh("cpu", [0]), [Replicate()], run_check=False)


def taught(name: str) -> None:
    """A frozen teacher, spread as the student is, and a student of which each step trains a part or nothing."""
    torch.manual_seed(RANK)
    with session_of(name) as session:
        teacher = session.spread(nn.Linear(2, 2).requires_grad_(False))
        student = session.spread(nn.Linear(2, 2))
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        run = session.attach(total=4, teacher=teacher, student=student, optimizer=optimizer)
        for number in range(4):
            try:
                loss = (student(torch.ones(2)) - teacher(torch.ones(2))).square().sum()
                optimizer.zero_grad()
                loss.backward()
                if number == 2:
                    raise ValueError("a bad batch")
                optimizer.step()
            except ValueError:
                run.boundary()  # a step without an update
                continue
            run.boundary(loss)
        assert run.step == run.total


CASES: dict[str, Callable[[str], None]] = {
    "a rank ahead": go_ahead,
    "taught": taught,
    "prepared": partial(shared, prepares=True, steps=2),
    "attached": lambda _: shared("prepared", prepares=False, steps=4),
    "prepared again": lambda _: shared("prepared", prepares=True, steps=6),
    "less data": partial(loop, steps=9, data=range(5 - RANK)),
    "left early": partial(loop, steps=9, data=range(9 - 7 * RANK)),
    "waited for": waited_for,
    "evaluated": partial(evaluated, by_epoch=False),
    "evaluated by epoch": partial(evaluated, by_epoch=True),
    "caught": caught,
    "other names": lambda name: loop(name, steps=2, parts={f"of_{RANK}": []}),
    "other kinds": lambda name: loop(name, steps=2, parts={"seen": [] if RANK == 0 else 3}),
    "other shapes": lambda name: loop(name, steps=2, parts={"factor": torch.zeros(1 + RANK)}),
    "outside": lambda name: loop(name, steps=2, parts={"factor": off_mesh()}),
    "saved": lambda name: loop(name, steps=2, parts={"factor": torch.zeros(2)}),
    "saved with another shape": lambda _: loop("saved", steps=4, parts={"factor": torch.zeros(3)}),
}

found = run_sessions((name, partial(case, name)) for name, case in CASES.items())
Path(f"{RANK_SETTINGS['result']}-{RANK}").write_text(json.dumps(found))
