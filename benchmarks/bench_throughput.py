"""Tokens a second and MFU of a transformer of about a billion parameters.

`make bench-throughput` trains the same model in bf16 on the same data by a plain torch loop (autocast, a fused AdamW,
DDP with several ranks) and by spottrain, without and with checkpoints every `--every` steps. Each way runs in
processes of its own, one after the other, `--rounds` times in turn. The ratios are to the plain loop. Without a GPU,
a tiny model only shows that it works. The benchmark prints a table and writes it, with a plot, to bench-out/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
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
from benchmarks.processes import run_world
from benchmarks.throughput.model import peak_tflops
from benchmarks.throughput.ranks import OURS_COMMITS, PLAIN, PLAIN_SAVES, WARM_UP, WAYS

Report = dict[str, Any]


def run(arguments: argparse.Namespace) -> dict[str, Report]:
    """Each way's report."""
    console = Console()
    rounds: dict[str, list[Report]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="bench-throughput-", dir=arguments.scratch) as scratch:
        for _ in range(arguments.rounds):
            for way in WAYS:
                console.print(f"[dim]{way} …[/dim]")
                folder = Path(scratch) / "way"
                folder.mkdir()
                result = folder / "result.json"
                command = ["benchmarks.throughput.ranks", way, str(folder), str(arguments.steps)]
                run_world([*command, str(arguments.every), str(result)], arguments.ranks)
                rounds[way].append(json.loads(result.read_text()))
                shutil.rmtree(folder)
    # The throughput that the device has reached, if no data sheet is known.
    measured = max(each["measured_tflops"] for of in rounds.values() for each in of)
    return {way: summary(of, arguments, measured) for way, of in rounds.items()}


def summary(rounds: list[Report], arguments: argparse.Namespace, measured_tflops: float) -> Report:
    """Return the median of the rounds, and what follows from it.

    That is tokens a second of all ranks, and TFLOP/s and MFU of each.
    """
    first = rounds[0]
    seconds = statistics.median(each["seconds"] for each in rounds)
    rate = first["tokens"] / seconds
    tflops = rate * first["flops_per_token"] / arguments.ranks / 1e12
    peak = peak_tflops(device_name())
    return {
        **first,
        "saved": min(each["saved"] for each in rounds),
        "seconds": [each["seconds"] for each in rounds],
        "tokens_per_second": rate,
        "tflops": tflops,
        "measured_tflops": measured_tflops,
        "peak_tflops": peak,
        "mfu": tflops / (peak or measured_tflops),
        "step_seconds": seconds / arguments.steps,
    }


def device_name() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"


def table(reports: dict[str, Report], arguments: argparse.Namespace) -> Table:
    plain = reports[PLAIN]
    parameters = f"{plain['parameters'] / 1e6:.3g} million parameters"
    title = f"{parameters} ({plain['shape']}) in bf16 on {arguments.ranks} × {device_name()}"
    found = Table("", "step ms", "tokens/s", "of plain", "TFLOP/s", "MFU", "ms a checkpoint", title=title)
    for way, report in reports.items():
        label = f"{way} every {arguments.every} steps" if way in (PLAIN_SAVES, OURS_COMMITS) else way
        found.add_row(
            label,
            f"{1e3 * report['step_seconds']:.1f}",
            f"{report['tokens_per_second']:.0f}",
            f"{100 * report['tokens_per_second'] / plain['tokens_per_second']:.1f} %",
            f"{report['tflops']:.3g}",
            f"{100 * report['mfu']:.1f} %",
            checkpoint_cost(way, reports, arguments),
        )
    return found


def checkpoint_cost(way: str, reports: dict[str, Report], arguments: argparse.Namespace) -> str:
    """Return the milliseconds of training that one checkpoint takes.

    They are the difference to the same loop without checkpoints.
    """
    if way not in (PLAIN_SAVES, OURS_COMMITS):
        return "–"
    if reports[way]["saved"] == 0:
        return "none: the one before was still under way"
    without = reports[WAYS[WAYS.index(way) - 2]]
    seconds = arguments.steps * (reports[way]["step_seconds"] - without["step_seconds"])
    return f"{1e3 * seconds / reports[way]['saved']:.0f}"


def plot(reports: dict[str, Report], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(9, 2.6))
    plain = reports[PLAIN]["tokens_per_second"]
    rates = [report["tokens_per_second"] for report in reports.values()]
    bars = axes.barh(range(len(reports)), rates, height=0.6, color=["#888888", "#2b5aa8", "#c0c0c0", "#7f9fd0"])
    axes.bar_label(bars, [f" {rate:.0f} ({100 * rate / plain:.1f} %)" for rate in rates])
    axes.set_yticks(range(len(reports)), list(reports))
    axes.set(xlabel="tokens a second", xlim=(0, 1.25 * max(rates)), title=device_name())
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    clean_up_on_sigterm()
    devices = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--ranks", type=int, default=devices or 1, help="at most one for each GPU, if there are any")
    parser.add_argument("--every", type=int, default=40, help="steps from one checkpoint to the next")
    parser.add_argument("--steps", type=int, help="steps that count (default: enough for one checkpoint)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--scratch", type=Path, help="folder for the checkpoints (default: TMPDIR)")
    arguments = parser.parse_args()
    if arguments.every <= WARM_UP:
        parser.error(f"--every is more than the {WARM_UP} steps that don't count")
    arguments.steps = arguments.steps or arguments.every
    arguments.out.mkdir(parents=True, exist_ok=True)
    reports = run(arguments)
    Console(width=130).print(table(reports, arguments))
    plot(reports, arguments.out / "throughput.svg")
    (arguments.out / "throughput.json").write_text(json.dumps(reports, indent=1))
    plain = reports[PLAIN]
    peak = f"{plain['peak_tflops']:.0f} by the data sheet" if plain["peak_tflops"] else "that one's"
    print(
        f"A large matrix product reaches {plain['measured_tflops']:.3g} TFLOP/s; MFU is of {peak}. "
        f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}. Written to {arguments.out}."
    )


if __name__ == "__main__":
    main()
