"""Ways to save a checkpoint, compared in one run.

The benchmark measures how long training waits, and what the store does.

`make bench-checkpoint` saves one sharded state repeatedly by torch.save from rank 0, DCP's save and async_save,
DeepSpeed's save_checkpoint, and spottrain, to files and to S3 (a local SeaweedFS). For comparison it also measures a
bare copy of the same bytes, and plain parallel writers and readers. Then a different number of ranks loads the newest
save. It prints tables and writes them, with a plot, to bench-out/. With GPUs, the state is on them, one rank each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import torch
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks import clean_up_on_sigterm
from benchmarks.checkpoint.state import TENSOR_BYTES
from benchmarks.checkpoint.world import run_ranks

Report = dict[str, Any]
PLAIN = "plain parallel writer"
COPY = "bare copy"
UNIT_MIB = 2 * TENSOR_BYTES >> 20  # half of what DeepSpeed saves are weights, in whole tensors


def measure(uri: str, arguments: argparse.Namespace, folder: Path, environment: dict[str, str]) -> Report:
    """Save and load at one world size, then load at another."""
    settings = {"mib": arguments.mib, "rounds": arguments.rounds, "folder": folder, "environment": environment}
    report = run_ranks("save", uri, world_size=arguments.ranks, **settings)
    resumed = run_ranks("resume", uri, world_size=arguments.resume_ranks, **settings)
    for way, found in resumed["ways"].items():
        report["ways"][way]["resume"] = found["load"]
    return report


def run(arguments: argparse.Namespace) -> dict[str, Report]:
    console = Console()
    reports = {}
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=arguments.scratch) as scratch:
        folder = Path(scratch)
        console.print("[dim]files …[/dim]")
        reports["file"] = measure(f"file://{folder}/files", arguments, folder, {})
        shutil.rmtree(folder / "files")
        if "s3" in arguments.stores:
            from benchmarks.checkpoint.s3 import BUCKET, s3_server  # it needs the client, and a server

            console.print("[dim]S3 …[/dim]")
            with s3_server(folder / "s3") as environment:
                reports["s3"] = measure(f"s3://{BUCKET}/run", arguments, folder, environment)
            # The bare copy uses no store.
            reports["s3"]["ways"][COPY] = reports["file"]["ways"][COPY]
    return reports


def rate(num_bytes: int, seconds: float | None) -> str:
    return "–" if not seconds else f"{num_bytes / seconds / 2**20:.0f}"


def share(best: float | None, seconds: float | None) -> str:
    return "–" if not seconds or not best else f"{100 * best / seconds:.0f} %"


def table(store: str, report: Report) -> Table:
    """One row for each way.

    Shares are of the plain parallel writer and reader on the same store.
    """
    ways, size = report["ways"], report["bytes"]
    copy, plain = ways[COPY]["stall"], ways[PLAIN]
    title = f"{store}: {size / 2**20:.0f} MiB from {report['world_size']} ranks on {report['device']}"
    columns = (
        "",
        "first stall s",
        "first durable s",
        "stall s",
        "× copy",
        "durable s",
        "MiB/s",
        "of plain",
        "written",
        "load s",
        "of plain",
        "resume s",
    )
    found = Table(*columns, title=title)
    for way, numbers in ways.items():
        written = numbers["written"] / size
        found.add_row(
            way,
            f"{numbers['first_stall']:.3f}",
            f"{numbers['first_durable']:.2f}",
            f"{numbers['stall']:.3f}",
            f"{numbers['stall'] / copy:.1f}",
            f"{numbers['durable']:.2f}",
            rate(size, numbers["durable"]) if way != COPY else "–",
            share(plain["durable"], numbers["durable"]) if way != COPY else "–",
            f"{written:.2f} ×" if written else "–",
            f"{numbers['load']:.2f}" if way != COPY else "–",
            share(plain["load"], numbers["load"]) if way != COPY else "–",
            f"{numbers['resume']:.2f}" if "resume" in numbers else "–",
        )
    return found


def plot(reports: dict[str, Report], path: Path) -> None:
    figure, (axes,) = plt.subplots(1, len(reports), figsize=(5.5 * len(reports), 3.4), sharey=False, squeeze=False)
    for pane, (store, report) in zip(axes, reports.items(), strict=True):
        ways = [way for way in report["ways"] if way != COPY]
        places = range(len(ways))
        durable = [report["ways"][way]["durable"] for way in ways]
        stalls = [report["ways"][way]["stall"] for way in ways]
        pane.barh(places, durable, height=0.7, color="#c8d4e8", label="until it is durable")
        bars = pane.barh(places, stalls, height=0.4, color="#2b5aa8", label="training waits")
        pane.bar_label(bars, [f" {stall:.2f} s" for stall in stalls])
        pane.axvline(report["ways"][COPY]["stall"], color="#888888", linestyle=":", label="bare copy")
        pane.set_yticks(places, ways)
        pane.set(title=store, xlabel="seconds")
        pane.invert_yaxis()
        pane.spines[["top", "right"]].set_visible(False)
    axes[0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    clean_up_on_sigterm()
    devices = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument(
        "--mib", type=int, default=8192 if devices else 256, help="size of the whole state in MiB, a multiple of 32"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=devices or 2)
    parser.add_argument("--resume-ranks", type=int, default=3)
    parser.add_argument(
        "--stores",
        nargs="+",
        choices=["file", "s3"],
        default=["file", "s3"],
        help="stores to save to; file is always one",
    )
    parser.add_argument("--scratch", type=Path, help="folder for the files and the S3 server (default: TMPDIR)")
    arguments = parser.parse_args()
    if arguments.mib < UNIT_MIB or arguments.mib % UNIT_MIB:
        parser.error(f"--mib is a multiple of {UNIT_MIB}, so that each way saves as many bytes")
    arguments.out.mkdir(parents=True, exist_ok=True)
    reports = run(arguments)
    for store, report in reports.items():
        Console(width=160).print(table(store, report))
    plot(reports, arguments.out / "checkpoint.svg")
    (arguments.out / "checkpoint.json").write_text(json.dumps(reports, indent=1))
    print(f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}. Written to {arguments.out}.")


if __name__ == "__main__":
    main()
