"""Data from shards: spottrain beside MosaicML Streaming, LitData, WebDataset and the loaders of torch.

`make bench-data` writes the same samples as shards of each format, and reads them in each way, in a process of its
own with two workers. It prints a table and writes it, with a plot, to bench-out/. Ways run in turn in each round, and
the table shows medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks import clean_up_on_sigterm
from benchmarks.loading.corpus import SAMPLES_PER_SHARD
from benchmarks.loading.measure import BATCH
from benchmarks.loading.readers import WAYS

TIMEOUT_SECONDS = 600
MEASURES = {
    "samples_per_second": ("samples a second", "{:,.0f}"),
    "wait": ("waiting, 20 ms a sample and a step", "{:.1%}"),
    "seconds_to_resume": ("seconds to the first batch of a resume", "{:.2f}"),
    "mebibytes": ("MiB of memory", "{:,.0f}"),
}
Result = dict[str, float]


def run(folder: Path, peers: Path, num_shards: int, rounds: int) -> dict[str, Result]:
    """Measure all ways; medians."""
    results: dict[str, list[Result]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way, found in results.items():
            print(f"Round {number + 1}: {way} ...", file=sys.stderr, flush=True)
            # Both have the same torch. The peers' may have an older numpy.
            python = sys.executable if way.startswith("spottrain") else str(peers)
            arguments = [way, str(folder), "--batches", str(num_shards * SAMPLES_PER_SHARD // BATCH)]
            found.append(_measured(python, *arguments) | _measured(python, *arguments, "--resume"))
    return {
        way: {name: statistics.median(each[name] for each in found) for name in MEASURES}
        for way, found in results.items()
    }


def _measured(python: str, *arguments: str) -> Result:
    command = [python, "-W", "ignore", "-m", "benchmarks.loading.measure", *arguments]
    # As in a rank: other threads would take the cores from the workers.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_SECONDS
    )
    found: Result = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def print_table(results: dict[str, Result]) -> None:
    table = Table("", *(title for title, _ in MEASURES.values()), title="Data from shards")
    for way, result in results.items():
        table.add_row(way, *(form.format(result[name]) for name, (_, form) in MEASURES.items()))
    Console(width=160).print(table)


def plot(results: dict[str, Result], path: Path) -> None:
    figure, panels = plt.subplots(1, len(MEASURES), figsize=(15, 3.6), sharey=True)
    colors = ["C1" if way.startswith("spottrain") else "C0" for way in results]
    for axes, (name, (title, form)) in zip(panels, MEASURES.items(), strict=True):
        values = [result[name] for result in results.values()]
        bars = axes.barh(list(results), values, color=colors)
        axes.bar_label(bars, [form.format(value) for value in values], padding=3)
        axes.set(title=title, xlim=(0, max(values) * 1.3))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="Python that has the peers' packages.")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--shards", type=int, default=20, help="Each has 1,000 samples.")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    out, folder = arguments.out.absolute(), arguments.out.absolute() / "shards"
    shutil.rmtree(folder, ignore_errors=True)
    corpus = [str(arguments.peers), "-m", "benchmarks.loading.corpus", str(folder), "--shards", str(arguments.shards)]
    subprocess.run(corpus, check=True)
    try:
        results = run(folder, arguments.peers.absolute(), arguments.shards, arguments.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print_table(results)
    plot(results, out / "data.svg")
    (out / "data.json").write_text(json.dumps(results, indent=1))
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}. Written to {out}.")


if __name__ == "__main__":
    main()
