"""What the agreement on the stop step, and the heartbeat, cost a step of 50 ms.

Run: torchrun --standalone --nproc-per-node 4 benchmarks/bench_agreement.py

Every rank runs steps that take 50 ms each and end with a small all-reduce, as gradients do. At each boundary it does
what the step loop does: read the agreement, stat drain.json, cast its ballot, report progress. The time of this is
measured directly, because the difference of whole steps would drown in the noise of the machine. `judge` is what
`stability` adds before the update: the losses of all ranks, at once. If there are more ranks than processors, they
wait for one; the processor time of the training thread leaves that out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from spottrain.world.drain import DrainFlag
from spottrain.world.launch import gloo_group
from spottrain.world.progress import ProgressReporter
from spottrain.world.stop_agreement import Ballot, StopAgreement

JUDGE, PROCESSOR = "judge", "processor"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-seconds", type=float, default=0.05)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    group = gloo_group()
    with tempfile.TemporaryDirectory() as folder:
        spent = measure(args.steps, args.step_seconds, group, Path(folder))
    report(spent, args.step_seconds)
    dist.barrier()
    dist.destroy_process_group()


def measure(num_steps: int, step_seconds: float, group: dist.ProcessGroup, run_dir: Path) -> dict[str, list[float]]:
    agreement, flag = StopAgreement(group), DrainFlag(run_dir)
    reporter = ProgressReporter(run_dir, local_rank=0, generation=1)
    gradient = torch.ones(1024)
    parts = (JUDGE, "read", "flag", "start", "report")
    spent: dict[str, list[float]] = {name: [] for name in (*parts, PROCESSOR)}
    agreement.settle(Ballot())
    for step in range(1, num_steps + 1):
        time.sleep(step_seconds)
        dist.all_reduce(gradient)
        marks = [time.perf_counter()]
        agreement.total([1.0, 0.0])
        marks.append(time.perf_counter())
        busy = time.thread_time()
        agreement.read()
        marks.append(time.perf_counter())
        drain = flag.is_set()
        marks.append(time.perf_counter())
        agreement.start(Ballot(drain=drain, loss=1.0, has_loss=True))
        marks.append(time.perf_counter())
        reporter.step(step, seconds=step_seconds, data_wait_seconds=0.0, tokens=None)
        marks.append(time.perf_counter())
        spent[PROCESSOR].append(time.thread_time() - busy)
        for name, begin, end in zip(parts, marks, marks[1:], strict=False):
            spent[name].append(end - begin)
    agreement.read()
    return spent


def report(spent: dict[str, list[float]], step_seconds: float) -> None:
    """Print rank 0's table; the share of a step is that of the slowest rank."""
    processor = spent.pop(PROCESSOR)
    always = [seconds for name, seconds in spent.items() if name != JUDGE]
    total = [sum(parts) for parts in zip(*always, strict=True)]
    figures = [statistics.median(total), statistics.mean(total), statistics.mean(processor)]
    shares = torch.tensor(figures, dtype=torch.float64) / step_seconds
    dist.all_reduce(shares, op=dist.ReduceOp.MAX)
    if dist.get_rank() != 0:
        return
    print(f"{'part':<10}{'median µs':>12}{'mean µs':>12}{'p99 µs':>12}")
    for name, seconds in {**spent, "all others": total}.items():
        p99 = statistics.quantiles(seconds, n=100)[98]
        columns = (statistics.median(seconds), statistics.mean(seconds), p99)
        print(f"{name:<10}" + "".join(f"{value * 1e6:>12.0f}" for value in columns))
    median, mean, busy = shares.tolist()
    of = f"a step of {step_seconds * 1e3:.0f} ms, on the slowest of {dist.get_world_size()} ranks"
    print(f"{median:.2%} (median) and {mean:.2%} (mean) of {of}; {busy:.2%} (mean) without waiting for a processor")


if __name__ == "__main__":
    main()
