"""Data from shards: spottrain beside MosaicML Streaming, LitData, WebDataset and the loaders of torch.

`make bench-data` writes the same samples as shards of each format, and reads them in each way, in a process of its
own with two workers: from files, and what can from a local S3 store (SeaweedFS). It prints a table and writes it,
with a plot, to bench-out/. Ways run in turn in each round, and the table shows medians. It also counts what nodes
read of a bucket in an epoch in which their number changes three times.
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
from benchmarks.checkpoint.s3 import BUCKET, s3_client, s3_server
from benchmarks.loading.corpus import FORMATS, SAMPLES_PER_SHARD, make_indices
from benchmarks.loading.measure import BATCH
from benchmarks.loading.readers import WAYS

TIMEOUT_SECONDS = 600
MEASURES = {
    "samples_per_second": ("samples a second", "{:,.0f}"),
    "microseconds": ("µs of processor time a sample", "{:,.0f}"),
    "wait": ("waiting, 20 ms a sample and a step", "{:.1%}"),
    "seconds_to_resume": ("seconds to the first batch of a resume", "{:.2f}"),
    "mebibytes": ("MiB of memory", "{:,.0f}"),
}
Result = dict[str, float]


def run(folder: Path, peers: Path, num_shards: int, rounds: int, bucket: dict[str, str]) -> dict[str, Result]:
    """Measure all ways; medians. `bucket` is the environment of its clients."""
    stores = [(way, "") for way in WAYS] + [(way, f"s3://{BUCKET}") for way in WAYS if WAYS[way].reads_bucket]
    results: dict[str, list[Result]] = {}
    for number in range(rounds):
        for way, uri in stores:
            name = f"{way}, from S3" if uri else way
            print(f"Round {number + 1}: {name} ...", file=sys.stderr, flush=True)
            # Both have the same torch. The peers' may have an older numpy.
            python = sys.executable if way.startswith("spottrain") else str(peers)
            num_batches = num_shards * SAMPLES_PER_SHARD // BATCH
            arguments = ["measure", way, str(folder), "--batches", str(num_batches), "--bucket", uri]
            results.setdefault(name, []).append(_printed(python, *arguments, environment=bucket))
    return {
        way: {name: statistics.median(each[name] for each in found) for name in MEASURES}
        for way, found in results.items()
    }


def _printed(python: str, module: str, *arguments: str, environment: dict[str, str]) -> Result:
    """What a module prints in a process of its own."""
    command = [python, "-W", "ignore", "-m", f"benchmarks.loading.{module}", *arguments]
    # As in a rank: other threads would take the cores from the workers.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        env=os.environ | threads | environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    found: Result = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def upload(folder: Path, environment: dict[str, str]) -> None:
    """Copy the shards and their indices into the bucket."""
    client = s3_client(environment)
    for format in FORMATS:
        for file in filter(Path.is_file, (folder / format).iterdir()):
            client.upload_file(str(file), BUCKET, f"{format}/{file.name}")


def print_table(results: dict[str, Result]) -> None:
    table = Table("", *(title for title, _ in MEASURES.values()), title="Data from shards")
    for way, result in results.items():
        table.add_row(way, *(form.format(result[name]) for name, (_, form) in MEASURES.items()))
    Console(width=160).print(table)


def plot(results: dict[str, Result], path: Path) -> None:
    figure, panels = plt.subplots(1, len(MEASURES), figsize=(18, 4.8), sharey=True)
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
    make_indices(folder)
    try:
        with s3_server(folder / "s3") as environment:
            upload(folder, environment)
            results = run(folder, arguments.peers.absolute(), arguments.shards, arguments.rounds, environment)
        resizes = _printed(sys.executable, "resizes", str(folder), environment={})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print_table(results)
    for chosen, share in resizes.items():
        print(f"In one epoch of 1,000 shards, {share:.3f} times the data is read with {chosen}.")
    plot(results, out / "data.svg")
    (out / "data.json").write_text(json.dumps({"ways": results, "resizes": resizes}, indent=1))
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}. Written to {out}.")


if __name__ == "__main__":
    main()
