"""The estimate of memory compared with the measured peak.

Run: python -m benchmarks.bench_memory [--ranks 2]

The result is a table of models and strategies. Real ranks on gloo build, shard and train each case for a few steps,
in fresh processes. The benchmark counts the storages that live at the same time on rank 0, at the start (while the
model is built and sharded) and in a step. The runtime's own memory (on a GPU: CUDA's context, NCCL's buffers) is in
no figure.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
from multiprocessing.queues import Queue

import torch

from benchmarks import clean_up_on_sigterm
from benchmarks.memory.cases import CASES, Case
from benchmarks.memory.rank import Peaks, estimated, join, measured

MIB = 1 << 20


def main() -> None:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    print("| layers x width, micro-batch x context of vocabulary | strategy | estimated | start, step | ratio |")
    print("|---|---|---|---|---|")
    for case in CASES:
        print(row(case, measure(case, args.ranks), estimated(case, args.ranks, "cpu")), flush=True)


def row(case: Case, found: Peaks, expected: Peaks) -> str:
    strategy = f"ZeRO {case.strategy}" if case.strategy.isdigit() else case.strategy
    how = ", recomputed" if case.checkpointed else ""
    measured = f"{found.start / MIB:.0f}, {found.step / MIB:.0f}"
    sizes = f"{expected.total / MIB:.0f} MiB | {measured} MiB | {expected.total / found.total:.2f}"
    return f"| {case.shape.name} | {strategy} {case.precision}{how} | {sizes} |"


def measure(case: Case, num_ranks: int) -> Peaks:
    """Peaks of rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ["DS_ACCELERATOR"] = "cpu"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "deepspeed", "benchmarks.memory.rank"])
    found: Queue[Peaks] = context.Queue()
    ranks = [context.Process(target=run_rank, args=(case, rank, num_ranks, port, found)) for rank in range(num_ranks)]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(300)
        if any(process.exitcode != 0 for process in ranks):
            raise SystemExit(f"{case} failed; see above.")
        return found.get(timeout=10)
    finally:
        for process in ranks:
            process.kill()


def run_rank(case: Case, rank: int, num_ranks: int, port: int, found: Queue[Peaks]) -> None:
    join(rank, num_ranks, port)
    peaks = measured(case, torch.device("cpu"))
    if rank == 0:
        found.put(peaks)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
