"""What one rank of bench_checkpoint does.

bench_checkpoint starts it, with torchrun's environment. Its arguments are: phase (save or resume), storage URI, MiB
of the state, rounds, file for the results.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from benchmarks.checkpoint.state import State, local_bytes, sharded_state
from benchmarks.checkpoint.ways import Spottrain, Way, ways_for
from spottrain.checkpoint.saving.writer import WriterProcess

Numbers = dict[str, dict[str, float]]


def slowest(seconds: float) -> float:
    """The largest value of all ranks."""
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def together() -> float:
    """The time, once all ranks are here."""
    dist.barrier()
    return time.perf_counter()


def bytes_below(uri: str) -> int:
    """Bytes in the folder; 0 for a bucket."""
    parts = urlsplit(uri)
    if parts.scheme != "file":
        return 0
    return sum(path.stat().st_size for path in Path(parts.path).rglob("*") if path.is_file())


def save_all(ways: list[Way], state: State, uri: str, rounds: int) -> Numbers:
    """Run all ways in turn, round after round.

    The first round, in which they plan and allocate, counts separately.
    """
    seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(1, rounds + 2):
        for way in ways:
            before = bytes_below(uri)
            started = together()
            way.save(state, number)
            stall = time.perf_counter() - started
            way.finish()
            durable = slowest(time.perf_counter() - started)
            # Not earlier: async_save uses the same group from its thread until it has finished.
            stall = slowest(stall)
            written = bytes_below(uri) - before
            if number > 1:
                for name, value in (("stall", stall), ("durable", durable), ("written", written)):
                    seen[way.name][name].append(value)
            elif dist.get_rank() == 0:
                seen[way.name]["first_stall"].append(stall)
                seen[way.name]["first_durable"].append(durable)
    return {way: {name: statistics.median(values) for name, values in of.items()} for way, of in seen.items()}


def load_all(ways: list[Way], state: State, rounds: int, save_rounds: int) -> Numbers:
    """Load the newest save of each way into this world."""
    seen: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for way in ways:
            started = together()
            way.load(state, save_rounds + 1)
            seen[way.name].append(slowest(time.perf_counter() - started))
    return {way: {"load": statistics.median(values)} for way, values in seen.items()}


def main() -> None:
    phase, uri, mib, rounds, result = sys.argv[1:]
    writers = [WriterProcess.fork() for _ in range(2)]  # before threads and CUDA start, as the agent does
    cuda = torch.cuda.is_available() and phase == "save"
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    state = sharded_state(int(mib), device, fill=phase == "save")
    saves = phase == "save"
    ways = ways_for(uri, 1 if saves else 2, writers, mib=int(mib), device=device, saves=saves)
    if saves:
        for way in ways:
            if isinstance(way, Spottrain):
                way.prepare(state)
        numbers = save_all(ways, state, uri, int(rounds))
        for name, found in load_all(ways, state, 2, int(rounds)).items():
            numbers[name] |= found
    else:
        numbers = load_all(ways, state, 2, int(rounds))
    total = torch.tensor([local_bytes(state)])
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        report = {"bytes": int(total), "device": device.type, "world_size": dist.get_world_size(), "ways": numbers}
        Path(result).write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
