"""How long a training makes no step after a node leaves.

`make bench-recovery` compares plain elastic torchrun and spottrain in one run. It prints a table and writes it, with
a plot, to bench-out/. Both sides train the same model with four ranks on this machine. Each case runs `--rounds`
times on both sides in turn, and the table shows medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks import clean_up_on_sigterm
from benchmarks.ports import free_ports
from benchmarks.recovery import managed, plain
from benchmarks.recovery.outcome import Outcome

CASES = {
    "sigterm": "a node leaves with notice",
    "sigkill": "a node is gone without notice",
    "store-host": "the host of the rendezvous store is gone",
}
WARM_STEPS = 150
PATIENCE_SECONDS = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The results of one case on both sides, and where spottrain's seconds went."""

    title: str
    plain: Outcome
    spottrain: Outcome
    phases: dict[str, float]


def median(outcomes: list[Outcome]) -> Outcome:
    """Medians; or the first round in which the job didn't come back, if there is one."""
    lost = next((outcome for outcome in outcomes if outcome.seconds_without_step is None), None)
    if lost is not None:
        return lost
    return Outcome(
        statistics.median(outcome.seconds_without_step or 0.0 for outcome in outcomes),
        round(statistics.median(outcome.steps_redone or 0 for outcome in outcomes)),
    )


def run(out: Path, rounds: int) -> list[Result]:
    console = Console()
    results = []
    for case, title in CASES.items():
        plains, ours, phases = [], [], []
        for number in range(rounds):
            console.print(f"[dim]{title}, round {number + 1}: plain torchrun …[/dim]")
            folder = out / "runs" / f"{case}-{number}"
            plains.append(
                plain.measure(
                    case, folder / "plain", free_ports(1)[0], warm_steps=WARM_STEPS, patience_seconds=PATIENCE_SECONDS
                )
            )
            console.print(f"[dim]{title}, round {number + 1}: spottrain …[/dim]")
            with managed.managed_job(folder / "spottrain") as job:
                outcome, spent = managed.measure(job, case, warm_steps=WARM_STEPS, patience_seconds=PATIENCE_SECONDS)
            ours.append(outcome)
            phases.append(spent)
            console.print(f"[dim]  plain {shown(plains[-1])[0]}, spottrain {shown(outcome)[0]}[/dim]")
        # None if a round has none: the job didn't come back, and that round is the result.
        names = phases[0] if all(phases) else ()
        medians = {name: statistics.median(each.get(name, 0.0) for each in phases) for name in names}
        results.append(Result(title=title, plain=median(plains), spottrain=median(ours), phases=medians))
    return results


def shown(outcome: Outcome) -> tuple[str, str]:
    """Seconds without a step, and steps that were repeated."""
    if outcome.has_ended:
        return "never: all agents have ended", "–"
    if outcome.seconds_without_step is None:
        return f"not within {PATIENCE_SECONDS:.0f}", "–"
    return f"{outcome.seconds_without_step:.1f}", str(outcome.steps_redone)


def print_table(results: list[Result]) -> None:
    table = Table("", "torchrun: seconds", "redone", "spottrain: seconds", "redone", "ratio", title="Without a step")
    for result in results:
        before, after = result.plain.seconds_without_step, result.spottrain.seconds_without_step
        ratio = f"{after / before:.3f}" if before and after else "–"
        table.add_row(result.title, *shown(result.plain), *shown(result.spottrain), ratio)
    Console().print(table)
    phases = Table("spottrain, phase by phase (seconds)", *(result.title for result in results))
    for name in dict.fromkeys(name for result in results for name in result.phases):
        cells = (result.phases.get(name) for result in results)
        phases.add_row(name, *("–" if cell is None else f"{cell:.2f}" for cell in cells))
    Console().print(phases)


def plot(results: list[Result], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(9, 3.2))
    sides = {
        "plain elastic torchrun": [result.plain for result in results],
        "spottrain": [result.spottrain for result in results],
    }
    for index, (label, outcomes) in enumerate(sides.items()):
        bars = axes.barh(
            [place + 0.4 * index for place in range(len(results))],
            [outcome.seconds_without_step or PATIENCE_SECONDS for outcome in outcomes],
            height=0.36,
            label=label,
        )
        axes.bar_label(bars, [shown(outcome)[0] for outcome in outcomes], padding=3)
    axes.set_yticks([place + 0.2 for place in range(len(results))], [result.title for result in results])
    axes.set(xlabel="seconds without a step", xlim=(0, PATIENCE_SECONDS * 1.45))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    shutil.rmtree(out / "runs", ignore_errors=True)
    results = run(out, arguments.rounds)
    print_table(results)
    plot(results, out / "recovery.svg")
    (out / "recovery.json").write_text(json.dumps([asdict(result) for result in results], indent=1))
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}. Written to {out}.")


if __name__ == "__main__":
    main()
