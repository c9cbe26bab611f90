"""One way to read, measured: `python -m benchmarks.loading.measure WAY FOLDER [--resume]`. It prints JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import torch

from benchmarks.loading.readers import WAYS, Batches, Reading

BATCH = 50
WORKERS = 2
SLOW_SECONDS = 0.02
NUM_WARM_UP = 20
NUM_SLOW_STEPS = 150

Open = Callable[..., Batches]


def epoch(open_batches: Open, state_file: Path, num_batches: int) -> dict[str, float]:
    """Read an epoch: samples a second after the first batch, memory, and the state at its half for `resume`."""
    batches, paused, memory = open_batches(batch=BATCH), 0.0, 0
    with closing(batches):
        next(batches.batches)
        started = time.monotonic()
        for count in range(2, num_batches + 1):
            next(batches.batches)
            if count == num_batches // 2:
                before = time.monotonic()
                torch.save(batches.state(count), state_file)
                memory = _memory()
                paused = time.monotonic() - before
        seconds = time.monotonic() - started - paused
    return {"samples_per_second": BATCH * (num_batches - 1) / seconds, "mebibytes": memory / 2**20}


def slow(open_batches: Open) -> dict[str, float]:
    """The share of a step of 20 ms that waits for data, with one sample a step, each of which takes 20 ms."""
    batches, waited, started = open_batches(batch=1, delay=SLOW_SECONDS), 0.0, 0.0
    with closing(batches):
        for step in range(NUM_WARM_UP + NUM_SLOW_STEPS):
            before = time.monotonic()
            if step == NUM_WARM_UP:
                waited, started = 0.0, before
            next(batches.batches)
            waited += time.monotonic() - before
            time.sleep(SLOW_SECONDS)
        return {"wait": waited / (time.monotonic() - started)}


def resume(open_batches: Open, state_file: Path) -> dict[str, float]:
    """Seconds until the first batch from the state of `epoch`, on a node that has no shards yet."""
    state = torch.load(state_file, weights_only=False)
    started = time.monotonic()
    batches = open_batches(batch=BATCH, state=state)
    with closing(batches):
        next(batches.batches)
        return {"seconds_to_resume": time.monotonic() - started}


def _memory() -> int:
    """Proportional set size of this process and its children: what they share counts once."""
    own = psutil.Process()
    return sum(each.memory_full_info().pss for each in (own, *own.children(recursive=True)))


@contextmanager
def opener(way: str, folder: Path) -> Iterator[Open]:
    """Opens batches of a way, each time on a node that has no shards yet. Its modules are imported."""
    chosen = WAYS[way]
    for module in chosen.imports:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as cache:

        def open_batches(*, batch: int, delay: float = 0.0, state: object = None) -> Batches:
            empty = Path(tempfile.mkdtemp(dir=cache))
            reading = Reading(folder=folder, cache=empty, batch=batch, workers=WORKERS, delay=delay)
            return chosen.read(chosen.format, reading, state)

        yield open_batches


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    state_file = arguments.folder / f"{arguments.way.replace(' ', '-')}.state"
    with opener(arguments.way, arguments.folder) as open_batches:
        if arguments.resume:
            found = resume(open_batches, state_file)
        else:
            found = epoch(open_batches, state_file, arguments.batches) | slow(open_batches)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
