"""How long a training stands still when a node leaves: plain elastic torchrun and spottrain, in one run.

`make bench-recovery` prints a table and writes it, with a plot, to bench-out/. Both sides train the same model with
four ranks on this machine; each case is done `--rounds` times on both sides in turn, and medians are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from .recovery import managed, plain
from .recovery.outcome import Outcome

CASES = {
    "sigterm": "a node leaves with notice",
    "sigkill": "a node is gone without notice",
    "store-host": "the host of the rendezvous store is gone",
}
WARM_STEPS = 150
PATIENCE_SECONDS = 200.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def median(outcomes: list[Outcome]) -> Outcome:
    """Medians; None where the job didn't come back in some round."""
    gaps = [outcome.seconds_without_step for outcome in outcomes]
    redone = [outcome.steps_redone for outcome in outcomes]
    if any(gap is None for gap in gaps):
        return Outcome(None, None)
    return Outcome(
        statistics.median(gap for gap in gaps if gap is not None),
        round(statistics.median(steps for steps in redone if steps is not None)),
    )


def run(out: Path, rounds: int) -> dict[str, dict[str, object]]:
    console = Console()
    results: dict[str, dict[str, object]] = {}
    for case, title in CASES.items():
        plains, ours, phases = [], [], []
        for number in range(rounds):
            console.print(f"[dim]{title}, round {number + 1}: plain torchrun …[/dim]")
            folder = out / "runs" / f"{case}-{number}"
            plains.append(
                plain.measure(
                    case, folder / "plain", free_port(), warm_steps=WARM_STEPS, patience_seconds=PATIENCE_SECONDS
                )
            )
            console.print(f"[dim]{title}, round {number + 1}: spottrain …[/dim]")
            job = managed.ManagedJob(folder / "spottrain")
            try:
                outcome, spent = managed.measure(job, case, warm_steps=WARM_STEPS, patience_seconds=PATIENCE_SECONDS)
            finally:
                job.close()
            ours.append(outcome)
            phases.append(spent)
            console.print(f"[dim]  plain {plains[-1]}, spottrain {outcome}[/dim]")
        names = list(phases[0])
        results[case] = {
            "title": title,
            "plain": median(plains),
            "spottrain": median(ours),
            "phases": {name: statistics.median(spent.get(name, 0.0) for spent in phases) for name in names},
        }
    return results


def shown(outcome: Outcome) -> tuple[str, str]:
    if outcome.seconds_without_step is None:
        return f"never (> {PATIENCE_SECONDS:.0f})", "–"
    return f"{outcome.seconds_without_step:.1f}", str(outcome.steps_redone)


def print_table(results: dict[str, dict[str, object]]) -> None:
    table = Table("", "torchrun: seconds", "redone", "spottrain: seconds", "redone", "ratio", title="Without a step")
    for result in results.values():
        before, after = result["plain"], result["spottrain"]
        assert isinstance(before, Outcome)
        assert isinstance(after, Outcome)
        ratio = "–"
        if before.seconds_without_step and after.seconds_without_step:
            ratio = f"{after.seconds_without_step / before.seconds_without_step:.2f}"
        table.add_row(str(result["title"]), *shown(before), *shown(after), ratio)
    Console().print(table)
    phases = Table("spottrain, phase by phase (seconds)", *(str(result["title"]) for result in results.values()))
    names = dict.fromkeys(name for result in results.values() for name in result["phases"])  # type: ignore[attr-defined]
    for name in names:
        cells = (result["phases"].get(name) for result in results.values())  # type: ignore[attr-defined]
        phases.add_row(name, *("–" if cell is None else f"{cell:.2f}" for cell in cells))
    Console().print(phases)


def plot(results: dict[str, dict[str, object]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(9, 3.2))
    for index, side in enumerate(("plain", "spottrain")):
        outcomes = [result[side] for result in results.values()]
        gaps = [getattr(outcome, "seconds_without_step", None) for outcome in outcomes]
        bars = axes.barh(
            [place + 0.4 * index for place in range(len(results))],
            [PATIENCE_SECONDS if gap is None else gap for gap in gaps],
            height=0.36,
            label={"plain": "plain elastic torchrun", "spottrain": "spottrain"}[side],
        )
        axes.bar_label(bars, ["never" if gap is None else f"{gap:.1f} s" for gap in gaps], padding=3)
    axes.set_yticks([place + 0.2 for place in range(len(results))], [str(item["title"]) for item in results.values()])
    axes.set(xlabel="seconds without a step", xlim=(0, PATIENCE_SECONDS * 1.12))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right")
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    shutil.rmtree(out / "runs", ignore_errors=True)
    results = run(out, arguments.rounds)
    print_table(results)
    plot(results, out / "recovery.svg")
    (out / "recovery.json").write_text(json.dumps(results, indent=1, default=lambda value: [*shown(value)]))
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}. Written to {out}.")


if __name__ == "__main__":
    main()
