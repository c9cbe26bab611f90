"""What replicas in peers' memory cost a step, and how fast a state comes back.

`make bench-replicas` lets ranks take steps with and without replicas in turns, `--blocks` times each. Each rank is a
member with a process of its own that holds replicas. The cost is the mean of the pairs' differences, with its
standard error. The job doesn't set how often to replicate, so that it is as often as may cost 2% of a step. Then the
newest step is read back as after a loss, and from a file store for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import clean_up_on_sigterm
from benchmarks.checkpoint.state import local_bytes, sharded_state
from benchmarks.ports import free_ports
from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.peers.replicas import Replicas
from spottrain.checkpoint.stores.uri import open_storage
from spottrain.world.launch import gloo_group
from spottrain_api.contract.replicas import ReplicaHolder, ReplicaSettings, ReplicatedStep

TOKEN = "bench"


class Loop:
    """One rank's training, more or less.

    A step is work on the device and one small reduction.
    """

    def __init__(self, replicas: Replicas, state: dict[str, Any], step_seconds: float) -> None:
        self._replicas = replicas
        self._state = state
        self._work = torch.ones(256, 256)
        self._repeats = 1
        self.step = 0
        self.num_replicas = 0
        self.step_seconds = step_seconds
        alone = min(self._compute() for _ in range(50))
        self._repeats = max(1, int(step_seconds / alone))

    def run(self, num_steps: int, *, replicate: bool) -> float:
        """Mean seconds of a step."""
        dist.barrier()
        started = time.perf_counter()
        for _ in range(num_steps):
            self._compute()
            self.step += 1
            due = replicate and self._replicas.is_due(self.step, self.step_seconds)
            flag = torch.tensor([float(due and dist.get_rank() == 0)])
            dist.all_reduce(flag)
            if flag:
                self.num_replicas += self._replicas.replicate(self._state, step=self.step, extra={}, rank_state=None)
        dist.barrier()
        return (time.perf_counter() - started) / num_steps

    def _compute(self) -> float:
        started = time.perf_counter()
        for _ in range(self._repeats):
            torch.mm(self._work, self._work)
        return time.perf_counter() - started


def rank_main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    state = sharded_state(arguments.mib, torch.device("cpu"), fill=True)
    group = gloo_group()
    settings = ReplicaSettings(
        token=TOKEN, own=arguments.holders[rank], peer=arguments.holders[(rank + 1) % world_size], interval=None
    )
    replicas = Replicas(
        settings, generation=1, ranks_per_node=world_size, group=group, rank=rank, world_size=world_size
    )
    loop = Loop(replicas, state, arguments.step_seconds)
    for _ in range(3):  # plan, allocate and measure
        replicas.replicate(state, step=0, extra={}, rank_state=None)
        replicas.close()
        dist.barrier()
    blocks: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(arguments.blocks):
        for replicate in (False, True):
            blocks[replicate].append(loop.run(arguments.steps, replicate=replicate))
            replicas.close()
    store = Checkpointer(
        open_storage(arguments.uri),
        generation=1,
        attempt_id="bench",
        process_group=group,
        rank=rank,
        world_size=world_size,
    )
    store.latest()
    store.save(dict(state), step=loop.step)
    loads = load_times(store, replicas, state, arguments, 3 + loop.num_replicas)
    total = torch.tensor([local_bytes(state)])
    dist.all_reduce(total)
    if rank == 0:
        report = {
            "bytes": int(total),
            "without": blocks[False],
            "with": blocks[True],
            "num_replicas": loop.num_replicas,
            "interval": replicas.interval(arguments.step_seconds),
            "cost": replicas.cost_seconds,
            **loads,
        }
        arguments.result.write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def load_times(
    store: Checkpointer, replicas: Replicas, state: dict[str, Any], arguments: argparse.Namespace, sequence: int
) -> dict[str, float]:
    """Seconds until all ranks have the state again, from replicas and from the store."""
    holders = tuple(ReplicaHolder(address=a, ranks=(r,)) for r, a in enumerate(arguments.holders))
    found = ReplicatedStep(generation=1, sequence=sequence, step=0, world_size=dist.get_world_size(), holders=holders)
    commit = store.latest()
    assert commit is not None
    seen: dict[str, list[float]] = {"replicas": [], "store": []}
    for _ in range(3):
        for name, load in (
            ("replicas", lambda: store.load_replica(lambda _: dict(state), replicas, found)),
            ("store", lambda: store.load(lambda _: dict(state), commit)),
        ):
            dist.barrier()
            started = time.perf_counter()
            load()
            dist.barrier()
            seen[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in seen.items()}


def start_holder(stack: ExitStack) -> str:
    """What holds a member's replicas, as its agent starts it; its address."""
    ours, theirs = socket.socketpair()
    listen = socket.create_server(("127.0.0.1", 0))
    descriptors = (theirs.fileno(), listen.fileno())
    command = [sys.executable, "-m", "spottrain_agent.replica_store", *map(str, descriptors)]
    process = subprocess.Popen(command, pass_fds=descriptors)
    stack.callback(process.wait)
    stack.callback(process.kill)
    stack.enter_context(ours)
    theirs.close()
    ours.sendall(f"{TOKEN}\n".encode())
    ours.recv(1 << 16)
    address = f"127.0.0.1:{listen.getsockname()[1]}"
    listen.close()
    return address


def main() -> None:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=128, help="size of the state in all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100, help="of a block")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--holders", nargs="*", help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--uri", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.blocks < 2:
        parser.error("--blocks is at least 2: the standard error is of several pairs")
    if arguments.holders:
        rank_main(arguments)
        return
    with tempfile.TemporaryDirectory(prefix="bench-replicas-") as scratch, ExitStack() as stack:
        result = Path(scratch) / "result.json"
        holders = [start_holder(stack) for _ in range(arguments.ranks)]
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "benchmarks.bench_replicas", *sys.argv[1:]]
        command += ["--uri", f"file://{scratch}/store", "--result", str(result), "--holders", *holders]
        size = str(arguments.ranks)
        world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = []
        for rank in range(arguments.ranks):
            process = subprocess.Popen(command, env={**os.environ, **world, "RANK": str(rank)})
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)
        if any(process.wait() for process in ranks):
            raise SystemExit("A rank failed; see above.")
        show(json.loads(result.read_text()), arguments)


def show(report: dict[str, Any], arguments: argparse.Namespace) -> None:
    without, with_ = statistics.median(report["without"]), statistics.median(report["with"])
    costs = [100 * (b / a - 1) for a, b in zip(report["without"], report["with"], strict=True)]
    error = statistics.stdev(costs) / len(costs) ** 0.5
    print(f"{report['bytes'] / 2**20:.0f} MiB from {arguments.ranks} members on {os.cpu_count()} cores")
    print(f"step without replicas   {1e3 * without:8.2f} ms (blocks {_blocks(report['without'])})")
    print(f"step with replicas      {1e3 * with_:8.2f} ms (blocks {_blocks(report['with'])})")
    print(f"cost of a step          {statistics.mean(costs):8.2f} % (± {error:.2f}, of {len(costs)} pairs)")
    print(
        f"replicas                {report['num_replicas']:8d}, one in {report['interval']} steps by a cost of",
        end=" ",
    )
    print(f"{1e3 * report['cost']:.1f} ms")
    print(f"state back from replicas {report['replicas']:8.3f} s")
    print(f"state back from a file   {report['store']:8.3f} s")


def _blocks(seconds: list[float]) -> str:
    return " ".join(f"{1e3 * each:.1f}" for each in seconds)


if __name__ == "__main__":
    main()
