"""One way to read, measured: `python -m benchmarks.loading.measure WAY FOLDER`. It prints JSON."""

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
    """Read an epoch: samples a second and processor time after the first batch, memory, and a state at its half."""
    batches, memory = open_batches(batch=BATCH), 0
    seconds = microseconds = 0.0
    with closing(batches):
        next(batches.batches)
        for first, last in ((2, num_batches // 2), (num_batches // 2 + 1, num_batches)):
            started, used = time.monotonic(), _processor_seconds()
            for _ in range(first, last + 1):
                next(batches.batches)
            seconds += time.monotonic() - started
            microseconds += 1e6 * (_processor_seconds() - used)
            if not memory:
                memory = _memory()
                torch.save(batches.state(last), state_file)
    num_samples = BATCH * (num_batches - 1)
    return {
        "samples_per_second": num_samples / seconds,
        "microseconds": microseconds / num_samples,
        "mebibytes": memory / 2**20,
    }


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


def _processor_seconds() -> float:
    """Of this process and its children."""
    own = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in (own, *own.children(recursive=True)))


@contextmanager
def opener(way: str, folder: Path, bucket: str) -> Iterator[Open]:
    """Opens batches of a way, each time on a node that has no shards yet. Its modules are imported."""
    chosen = WAYS[way]
    for module in chosen.imports:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as cache:

        def open_batches(*, batch: int, delay: float = 0.0, state: object = None) -> Batches:
            empty = Path(tempfile.mkdtemp(dir=cache))
            reading = Reading(folder=folder, cache=empty, batch=batch, workers=WORKERS, bucket=bucket, delay=delay)
            return chosen.read(chosen.format, reading, state)

        yield open_batches


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--bucket", default="", help="Its URI, to read from there.")
    arguments = parser.parse_args()
    state_file = arguments.folder / f"{arguments.way.replace(' ', '-')}.state"
    with opener(arguments.way, arguments.folder, arguments.bucket) as open_batches:
        found = epoch(open_batches, state_file, arguments.batches)
        found |= slow(open_batches) | resume(open_batches, state_file)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
