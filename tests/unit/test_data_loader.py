"""Fetching a rank's samples is the same with and without workers.

The workers end with their rank.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count, islice
from multiprocessing.context import ForkProcess
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from cluster_fixtures import wait_for
from spottrain.data import random_state
from spottrain.data.batch import BatchPlan
from spottrain.data.batches import Batches
from spottrain.data.loader import NUM_MEASURED, Data, load_batches
from spottrain.data.order import Permutation
from spottrain.data.workers import FromWorkers
from spottrain.world.failures import LOST_WORKER, failure_of


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_come_in_order_from_any_step_on(num_workers: int) -> None:
    dataset = list(range(23))
    order, plan = Permutation(num_samples=23, seed=4), BatchPlan(global_batch=7, micro_batch=2, world_size=2)
    data = Data(dataset, num_workers=num_workers)
    batches = load_batches(
        data, Batches(order, plan.global_batch), plan, rank=1, first_step=5, device=torch.device("cpu")
    )
    found = [next(batches).data.tolist() for _ in range(2)]
    assert found == [order.samples(micro.positions).tolist() for micro in plan.micro_batches(1, range(35, 42))]


class Draws:
    """Items that are drawn at random, with the process that fetched them."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, float]:
        drawn = {"python": random.random(), "numpy": np.random.rand(), "torch": torch.rand(1).item()}
        return {"index": index, "pid": os.getpid(), **drawn}


class Clock:
    """A clock by which every micro-batch takes a while to fetch."""

    def __init__(self, seconds: float) -> None:
        self._readings = count(0.0, seconds)

    def __call__(self) -> float:
        return next(self._readings)


def batches_of(dataset: Any, *, steps: int = 8, seconds: float = 0.0, **how: Any) -> list[Any]:
    """The batches of one rank of two.

    The rank draws random numbers itself between them. Fetching one takes `seconds`.
    """
    order, plan = Permutation(num_samples=23, seed=4), BatchPlan(global_batch=6, micro_batch=3, world_size=2)
    data = Data(dataset, **how)
    batches = load_batches(
        data,
        Batches(order, plan.global_batch),
        plan,
        rank=1,
        first_step=5,
        device=torch.device("cpu"),
        now=Clock(seconds),
    )
    found = []
    with closing(batches):
        for _ in range(steps):
            found.append(next(batches).data)
            torch.rand(1), np.random.rand(), random.random()
    return found


@pytest.mark.parametrize(
    "how",
    [
        {"num_workers": 1},
        {"num_workers": 2, "loader": {"prefetch_factor": 1}},
        pytest.param({"num_workers": 1, "loader": {"multiprocessing_context": "spawn"}}, marks=pytest.mark.nightly),
        {"seconds": 1.0},
    ],
    ids=["one", "two", "spawned", "default"],
)
def test_samples_and_what_they_draw_do_not_depend_on_who_fetches_them(how: dict[str, Any]) -> None:
    own, of_workers = batches_of(Draws(), num_workers=0), batches_of(Draws(), **how)
    for one, other in zip(own, of_workers, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one.keys() - {"pid"})
    assert of_workers[-1]["pid"][0] != os.getpid()


def test_the_wait_for_data_is_what_fetching_took_since_it_was_asked_for() -> None:
    data, order, plan = _of_draws()
    batches = load_batches(data, order, plan, rank=0, first_step=0, device=torch.device("cpu"), now=Clock(0.5))
    next(batches), next(batches)
    assert batches.pop_wait() == 1.0
    next(batches)
    assert batches.pop_wait() == 0.5


class NumWorkersStarted(Draws):
    """How many workers have said in this process that they start."""

    def __init__(self) -> None:
        self.started: list[int] = []

    def __getitem__(self, index: int) -> dict[str, float]:
        return {"started": len(self.started)}


def test_what_a_script_has_done_first_in_a_worker_is_done_there() -> None:
    dataset = NumWorkersStarted()
    found = batches_of(dataset, num_workers=1, loader={"worker_init_fn": dataset.started.append})
    assert all(batch["started"].tolist() == [1] * 3 for batch in found)
    assert dataset.started == []


def test_a_sample_draws_the_same_in_whatever_micro_batch_it_is() -> None:
    def drawn(micro_batch: int) -> list[float]:
        plan = BatchPlan(global_batch=6, micro_batch=micro_batch, world_size=1)
        batches = Batches(Permutation(num_samples=23, seed=4), global_batch=6)
        found = load_batches(
            Data(Draws(), num_workers=0), batches, plan, rank=0, first_step=0, device=torch.device("cpu")
        )
        return torch.cat([next(found).data["torch"] for _ in range(plan.num_micro_batches)]).tolist()

    assert drawn(2) == drawn(6)


class DrawsAtTimes:
    """Items of which some draw random numbers, from a different generator each time."""

    def __init__(self, drawing: set[int]) -> None:
        self._drawing = drawing

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, float]:
        if index not in self._drawing:
            return index, 0.0
        draws: list[Callable[[], float]] = [random.random, np.random.rand, lambda: torch.rand(1).item()]
        return index, draws[index % 3]()


@pytest.mark.parametrize("drawing", [set(range(23)), {4}, {3, 8, 10}, set()], ids=["all", "one", "some", "none"])
def test_items_that_draw_and_those_that_do_not_are_as_if_each_was_seeded(drawing: set[int]) -> None:
    dataset, order = DrawsAtTimes(drawing), Permutation(num_samples=23, seed=4)

    def collate(items: list[Any]) -> Any:
        return items, torch.rand(1).item(), random.random(), np.random.rand()

    def seeded(position: int) -> Any:
        random_state.seed_host(4, step=position)
        return dataset[int(order.samples([position])[0])]

    plan = BatchPlan(global_batch=6, micro_batch=6, world_size=1)
    data = Data(dataset, num_workers=0, collate=collate)
    found = load_batches(
        data, Batches(order, plan.global_batch), plan, rank=0, first_step=0, device=torch.device("cpu")
    )
    for step in range(8):
        assert next(found).data == collate([seeded(step * 6 + place) for place in range(6)])


class InGroups(DrawsAtTimes):
    """Items that can be fetched several at once."""

    def __init__(self) -> None:
        super().__init__(set())
        self.groups: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        self.groups.append(indices)
        return [self[index] for index in indices]


def test_items_that_draw_nothing_are_fetched_together_in_chunks_of_the_order() -> None:
    dataset, order = InGroups(), Permutation(num_samples=23, seed=4)
    plan = BatchPlan(global_batch=3000, micro_batch=3000, world_size=1)
    found = load_batches(
        Data(dataset, num_workers=0),
        Batches(order, plan.global_batch),
        plan,
        rank=0,
        first_step=2,
        device=torch.device("cpu"),
    )
    for _ in range(3):
        next(found)
    assert dataset.groups == [order.samples(range(3000 * step, 3000 * (step + 1))).tolist() for step in (3, 4)]


def test_the_random_numbers_of_training_do_not_know_of_the_data() -> None:
    random_state.seed_everything(1)
    state = random_state.capture()
    list(islice(load_batches(*_of_draws(), rank=0, first_step=0, device=torch.device("cpu")), 3))
    assert random_state.capture() == state


def _of_draws() -> tuple[Data, Batches, BatchPlan]:
    plan = BatchPlan(global_batch=6, micro_batch=3, world_size=1)
    return Data(Draws(), num_workers=0), Batches(Permutation(num_samples=23), plan.global_batch), plan


def test_by_default_a_worker_fetches_what_takes_its_time_and_no_worker_what_does_not() -> None:
    dear = batches_of(Draws(), seconds=1.0)
    pids = [int(batch["pid"][0]) for batch in dear]
    assert set(pids[:NUM_MEASURED]) == {os.getpid()}
    assert os.getpid() not in pids[NUM_MEASURED:]
    assert len(set(pids)) == 2
    wait_for(lambda: not is_running(pids[-1]), "the worker ends with the loop")
    assert all(batch["pid"][0] == os.getpid() for batch in batches_of(Draws(), seconds=1e-4))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch waits 5 s for a worker before it kills it."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)


class OnlyHere(Draws):
    """Can't be read by another process, as a client with threads of its own."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __getitem__(self, index: int) -> dict[str, float]:
        if os.getpid() != self._pid:
            raise RuntimeError("This class is not fork-safe")
        return super().__getitem__(index)


@pytest.mark.usefixtures("impatient")
def test_by_default_data_that_a_worker_cannot_read_are_read_by_the_rank() -> None:
    found, wanted = batches_of(OnlyHere(), seconds=1.0), batches_of(Draws(), num_workers=0)
    assert [batch["index"].tolist() for batch in found] == [batch["index"].tolist() for batch in wanted]
    with pytest.raises(RuntimeError, match="not fork-safe"):
        batches_of(OnlyHere(), num_workers=1)


@pytest.mark.usefixtures("impatient")
def test_by_default_batches_that_cannot_be_handed_over_are_made_by_the_rank(caplog: pytest.LogCaptureFixture) -> None:
    """A worker says so to nobody, so that it would be waited for."""

    def with_a_function(items: list[Any]) -> dict[str, Any]:
        return {"index": torch.tensor([item["index"] for item in items]), "function": lambda: None}

    found = batches_of(Draws(), seconds=1.0, collate=with_a_function, loader={"timeout": 0.2})
    wanted = batches_of(Draws(), num_workers=0)
    assert [batch["index"].tolist() for batch in found] == [batch["index"].tolist() for batch in wanted]
    assert "Can't pickle local object" in caplog.text


class HangsElsewhere(OnlyHere):
    def __getitem__(self, index: int) -> dict[str, float]:
        if os.getpid() != self._pid:
            Event().wait()
        return super().__getitem__(index)


@pytest.mark.usefixtures("impatient")
def test_by_default_data_that_hang_in_a_worker_are_read_by_the_rank() -> None:
    found = batches_of(HangsElsewhere(), seconds=1.0, loader={"timeout": 0.2})
    assert [batch["pid"][0] for batch in found] == [os.getpid()] * len(found)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"num_workers": 0, "loader": {"timeout": 5}}, "timeout is for workers"),
        ({"loader": {"prefetch_factor": 0}}, "prefetch_factor is 0"),
        ({"num_workers": "2"}, "num_workers is '2'"),
        ({"num_workers": 2.0}, "num_workers is 2.0"),
    ],
    ids=str,
)
def test_what_torch_would_refuse_without_a_sentence_is_refused_with_one(how: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Data(Draws(), **how).check()


class Late(Iterator[int]):
    """As torch's DataLoader if items take longer than its timeout."""

    def __init__(self, answers: list[int | None]) -> None:
        self._answers = iter(answers)

    def __next__(self) -> int:
        answer = next(self._answers)
        if answer is None:
            raise RuntimeError("DataLoader timed out after 60 seconds")
        return answer


class Records:
    """Numbers in a file, which is kept open.

    A worker waits between seeking and reading until the file was read elsewhere.
    """

    def __init__(self, path: Path, size: int) -> None:
        path.write_bytes(bytes(range(size)))
        self.file = os.open(path, os.O_RDONLY)
        self._size = size
        context = multiprocessing.get_context("fork")
        self.is_between, self.may_read = context.Event(), context.Event()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        os.lseek(self.file, index, os.SEEK_SET)
        if get_worker_info() is not None:
            self.is_between.set()
            self.may_read.wait()
        return os.read(self.file, 1)[0]


def test_a_worker_and_a_script_that_evaluates_read_the_same_file(tmp_path: Path) -> None:
    records = Records(tmp_path / "records", 8)

    def evaluate() -> None:
        records.is_between.wait()
        os.lseek(records.file, 0, os.SEEK_SET)
        records.may_read.set()

    evaluation = Thread(target=evaluate)
    evaluation.start()
    data, order = Data(records, num_workers=1), Permutation(num_samples=8, shuffle=False)
    plan = BatchPlan(global_batch=4, micro_batch=4, world_size=1)
    with closing(
        load_batches(data, Batches(order, plan.global_batch), plan, rank=0, first_step=1, device=torch.device("cpu"))
    ) as batches:
        assert next(batches).data.tolist() == [4, 5, 6, 7]
    evaluation.join()


def test_a_worker_that_has_answered_once_is_waited_for() -> None:
    assert list(FromWorkers(Late([1, None, None, 2]), waits_after_first=True)) == [1, 2]
    with pytest.raises(RuntimeError, match="timed out"):
        next(FromWorkers(Late([None, 1]), waits_after_first=True))
    with pytest.raises(RuntimeError, match="timed out"):
        list(FromWorkers(Late([1, None]), waits_after_first=False))


class Broken(Draws):
    def __getitem__(self, index: int) -> dict[str, float]:
        return {"label": {"cat": 1}["dog"]}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_data_set_is_reported_as_its_own(num_workers: int) -> None:
    with pytest.raises(KeyError) as raised:
        batches_of(Broken(), num_workers=num_workers)
    failure = failure_of(raised.value, rank=0)
    assert failure is not None
    where = ", in a data worker" if num_workers else ""
    assert re.fullmatch(rf"KeyError: 'dog' \({re.escape(__file__)}, line \d+{where}\)", failure.message)


def test_a_worker_that_is_killed_is_reported_in_a_sentence() -> None:
    """In a process of its own: torch raises the error wherever it is."""
    with forked(RANK_WITH_A_WORKER + THAT_IS_KILLED) as (_, output):
        said = output.read().strip()
    assert said.startswith("DataLoader worker")
    assert said.endswith(LOST_WORKER)


def test_workers_end_with_their_rank_also_if_that_is_killed() -> None:
    """Though one is in the middle of a long item."""
    with forked(RANK_WITH_A_WORKER + WITH_LONG_ITEMS) as (rank, output):
        worker = int(output.readline())
        rank.kill()
        wait_for(lambda: not is_running(worker), "the worker ends")


def test_workers_go_on_if_torchrun_asks_their_rank_to_stop() -> None:
    """It sends SIGTERM to the rank's process group, and the rank drains."""
    with forked(RANK_WITH_A_WORKER + THAT_DRAINS) as (rank, output):
        assert output.readline() == "trains\n"
        assert rank.pid is not None
        os.killpg(rank.pid, signal.SIGTERM)
        assert output.read() == "1 1 1 1 1\n"
        rank.join()
    assert rank.exitcode == 0


@contextmanager
def forked(program: str) -> Iterator[tuple[ForkProcess, IO[str]]]:
    """A Python program in a fork of this process, which has imported torch, with a group of its own; and its output.

    It has ended after the block.
    """
    reader, writer = os.pipe()

    def run() -> None:
        os.setsid()
        os.close(reader)
        sys.stdout = open(writer, "w")  # noqa: SIM115
        exec(program, {"__name__": "__main__"})
        sys.stdout.flush()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    os.close(writer)
    try:
        with open(reader) as output:
            yield process, output
    finally:
        process.kill()
        process.join()


def is_running(pid: int) -> bool:
    """A process that nobody has waited for yet is none."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


RANK_WITH_A_WORKER = """
import os, signal, time, torch
from spottrain.data.batch import BatchPlan
from spottrain.data.batches import Batches
from spottrain.data.order import Permutation
from spottrain.world.failures import failure_of
from spottrain.data.loader import Data, load_batches

class Numbers:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.get()

plan = BatchPlan(global_batch=1, micro_batch=1, world_size=1)
data = Data(Numbers(), num_workers=1)
cut = Batches(Permutation(num_samples=1), 1)
batches = load_batches(data, cut, plan, rank=0, first_step=0, device=torch.device("cpu"))
"""
WITH_LONG_ITEMS = """
def get(self):
    print(os.getpid(), flush=True)
    time.sleep(600)

Numbers.get = get
next(batches)
"""
THAT_DRAINS = """
Numbers.get = lambda self: 1
stops = []
signal.signal(signal.SIGTERM, lambda *_: stops.append(True))
next(batches)
print("trains", flush=True)
while not stops:
    next(batches)
print(*(int(next(batches).data) for _ in range(5)))
"""
THAT_IS_KILLED = """
Numbers.get = lambda self: os.getpid()
try:
    os.kill(int(next(batches).data), signal.SIGKILL)
    for _ in batches:
        pass
except RuntimeError as error:
    print(failure_of(error, rank=0).message)
"""
