"""Seconds of each part of a restart, for a model of 1 GB on the CPU.

Run: python -m benchmarks.bench_restart [--layers 64] [--rounds 3] [--threads 2]

A first start commits a step. Then processes of one rank resume from it in turns: with a model that the script builds
itself and with `session.build`, each with one thread (torchrun's default) and with several. Medians.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from statistics import median

from benchmarks import clean_up_on_sigterm

PARTS = ("build", "spread", "load", "stage", "first step")
WIDTH = 2048


Seconds = dict[str, tuple[float, float]]


def start(uri: str, *options: str) -> Seconds:
    """One start of the script; its seconds by part, and those of the processors."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.restart.rank", uri, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    seconds: Seconds = json.loads(done.stdout.splitlines()[-1])
    return seconds


def row(way: str, runs: list[Seconds]) -> str:
    """Medians of the parts and their sum, with those of the processors in brackets."""
    pairs = [[median(run.get(part, (0.0, 0.0))[kind] for run in runs) for kind in (0, 1)] for part in PARTS]
    cells = [*pairs, [sum(column) for column in zip(*pairs, strict=True)]]
    return f"| {way} | {' | '.join(f'{waited:.2f} ({computed:.2f})' for waited, computed in cells)} |"


def main() -> None:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=64, help="of 16 MiB each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    size = ("--layers", str(args.layers), "--width", str(WIDTH))
    ways = {
        f"{name}, {threads} thread{'s' * (threads > 1)}": (*size, *usual, "--threads", str(threads))
        for threads in (1, args.threads)
        for name, usual in (("usual build", ("--usual",)), ("session.build", ()))
    }
    found: dict[str, list[Seconds]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        uri = f"file://{folder}/commits"
        first = start(uri, *ways["session.build, 1 thread"], "--commits")
        for _ in range(args.rounds):
            for way, options in ways.items():
                found[way].append(start(uri, *options))
    rounds = f"medians of {args.rounds} rounds"
    print(f"A model of {args.layers * 16 / 1024:.1f} GiB; seconds, in brackets those of the processors, {rounds}.\n")
    print(f"| start | {' | '.join(PARTS)} | sum |")
    print("|---" * (len(PARTS) + 2) + "|")
    for way, runs in {"the first, 1 thread": [first], **found}.items():
        print(row(way, runs))


if __name__ == "__main__":
    main()
