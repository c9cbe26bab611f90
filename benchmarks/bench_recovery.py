"""How long a training makes no step after a node leaves.

`make bench-recovery` compares plain elastic torchrun, torchft and spottrain in one run. It prints a table and writes
it, with a plot, to bench-out/. All sides train the same model with four ranks on this machine. Each case runs
`--rounds` times on all sides in turn, and the table shows medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks import clean_up_on_sigterm
from benchmarks.recovery import managed, plain, torchft_side
from benchmarks.recovery.outcome import PATIENCE_SECONDS, Outcome

CASES = {
    "sigterm": "a node leaves with notice",
    "sigkill": "a node is gone without notice",
    "store-host": "the host of the rendezvous store is gone",
}
TUNED_HEARTBEAT_MS = 1000


@dataclass(frozen=True, slots=True)
class Side:
    """One way to train. `measure` runs it in a folder of its own, and returns what a case costs it."""

    title: str
    measure: Callable[[str, Path], Outcome]
    member_hosts_store: bool = True

    def has(self, case: str) -> bool:
        """Whether the case can happen to it."""
        return self.member_hosts_store or case != "store-host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The results of one case, by the titles of the sides."""

    title: str
    outcomes: dict[str, Outcome]


def sides(peers: Path) -> dict[str, Side]:
    """All sides, by the names of their folders. `peers` is the Python that has the peers' packages."""
    torchft = partial(torchft_side.measure, python=peers)
    tuned = partial(torchft, heartbeat_timeout_ms=TUNED_HEARTBEAT_MS)
    return {
        "plain": Side("elastic torchrun", plain.measure),
        "torchft": Side("torchft, heartbeats of 5 s", torchft, member_hosts_store=False),
        "torchft-tuned": Side("torchft, heartbeats of 1 s", tuned, member_hosts_store=False),
        "spottrain": Side("spottrain", managed.measure),
    }


def median(outcomes: list[Outcome]) -> Outcome:
    """Medians; or the first round in which the job didn't come back, if there is one."""
    lost = next((outcome for outcome in outcomes if outcome.seconds_without_step is None), None)
    if lost is not None:
        return lost
    phases = dict.fromkeys(name for outcome in outcomes for name in outcome.phases)
    return Outcome(
        statistics.median(outcome.seconds_without_step or 0.0 for outcome in outcomes),
        round(statistics.median(outcome.steps_redone or 0 for outcome in outcomes)),
        phases={name: statistics.median(outcome.phases.get(name, 0.0) for outcome in outcomes) for name in phases},
    )


def run(out: Path, sides: Mapping[str, Side], cases: Mapping[str, str], rounds: int) -> list[Result]:
    console = Console()
    results = []
    for case, title in cases.items():
        found: dict[str, list[Outcome]] = {}
        for number in range(rounds):
            for name, side in sides.items():
                if not side.has(case):
                    continue
                console.print(f"[dim]{title}, round {number + 1}: {side.title} …[/dim]")
                outcome = side.measure(case, out / "runs" / f"{case}-{number}" / name)
                found.setdefault(side.title, []).append(outcome)
                console.print(f"[dim]  {shown(outcome)[0]}[/dim]")
        results.append(Result(title=title, outcomes={side: median(each) for side, each in found.items()}))
    return results


def shown(outcome: Outcome | None) -> tuple[str, str]:
    """Seconds without a step, and steps that were repeated."""
    if outcome is None:
        return "–", "–"
    if outcome.has_ended:
        return "never: the job has ended", "–"
    if outcome.seconds_without_step is None:
        return f"not within {PATIENCE_SECONDS:.0f}", "–"
    return f"{outcome.seconds_without_step:.1f}", str(outcome.steps_redone)


def print_tables(results: list[Result]) -> None:
    titles = dict.fromkeys(side for result in results for side in result.outcomes)
    table = Table("", "side", "seconds without a step", "steps redone", title="Without a step")
    for result in results:
        for number, side in enumerate(titles):
            table.add_row("" if number else result.title, side, *shown(result.outcomes.get(side)))
        table.add_section()
    Console().print(table)
    for side in titles:
        phases = [result.outcomes[side].phases if side in result.outcomes else {} for result in results]
        if any(phases):
            print_phases(side, {result.title: each for result, each in zip(results, phases, strict=True)})


def print_phases(side: str, phases: Mapping[str, Mapping[str, float]]) -> None:
    """The seconds of each phase, by the titles of the cases."""
    table = Table(f"{side}, phase by phase (seconds)", *phases)
    for name in dict.fromkeys(name for each in phases.values() for name in each):
        cells = (each.get(name) for each in phases.values())
        table.add_row(name, *("–" if cell is None else f"{cell:.2f}" for cell in cells))
    Console().print(table)


def plot(results: list[Result], path: Path) -> None:
    titles = list(dict.fromkeys(side for result in results for side in result.outcomes))
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.35 * len(titles) * len(results)))
    height = 0.8 / len(titles)
    for index, side in enumerate(titles):
        rows = [(place, result.outcomes[side]) for place, result in enumerate(results) if side in result.outcomes]
        bars = axes.barh(
            [place + height * index for place, _ in rows],
            [outcome.seconds_without_step or PATIENCE_SECONDS for _, outcome in rows],
            height=0.9 * height,
            label=side,
        )
        axes.bar_label(bars, [shown(outcome)[0] for _, outcome in rows], padding=3)
    centre = height * (len(titles) - 1) / 2
    axes.set_yticks([place + centre for place in range(len(results))], [result.title for result in results])
    axes.set(xlabel="seconds without a step", xlim=(0, PATIENCE_SECONDS * 1.45))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="Python that has the peers' packages.")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    shutil.rmtree(out / "runs", ignore_errors=True)
    results = run(out, sides(arguments.peers.absolute()), CASES, arguments.rounds)
    print_tables(results)
    plot(results, out / "recovery.svg")
    (out / "recovery.json").write_text(json.dumps([asdict(result) for result in results], indent=1))
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}. Written to {out}.")


if __name__ == "__main__":
    main()
