"""`make crash-points`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import tempfile
import time
from pathlib import Path

from benchmarks import clean_up_on_sigterm
from rich.console import Console
from rich.table import Table

from crash_points.campaign import Verdict, disturbed, lanes, references
from crash_points.disturbances import Kind, disturbances
from crash_points.scenarios import SCENARIOS
from spottrain_local.processes import watch_children_by_pidfd


def main() -> int:
    clean_up_on_sigterm()
    watch_children_by_pidfd()
    logging.basicConfig(level=logging.ERROR)
    parser = argparse.ArgumentParser(prog="crash_points", description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)}; by default all")
    parser.add_argument("--kinds", nargs="+", type=Kind, choices=list(Kind), help="of disturbances; by default all")
    parser.add_argument("--numbers", nargs="+", type=int, help="of writes and events; by default all")
    parser.add_argument("--lanes", type=int, default=6, help="runs at once")
    parser.add_argument("--folder", type=Path, help="for the operators' logs; by default one that is removed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spottrain-crash-") as folder:
        return asyncio.run(_campaign(options, options.folder or Path(folder)))


async def _campaign(options: argparse.Namespace, folder: Path) -> int:
    begun = time.monotonic()
    scenarios = options.scenarios or list(SCENARIOS)
    async with lanes(folder, options.lanes) as opened:
        reference = await references(opened, scenarios, _tell)
        if any(outcome.error for outcome in reference.values()):
            return 1
        for name, outcome in reference.items():
            print(f"{name}: {outcome.num_events} events; {', '.join(outcome.writes)}\n  {outcome.state}")
        runs = [
            (name, disturbance)
            for name in scenarios
            for disturbance in disturbances(len(reference[name].writes), reference[name].num_events)
            if not (options.kinds and disturbance.kind not in options.kinds)
            and not (options.numbers and disturbance.number not in options.numbers)
        ]
        random.Random(0).shuffle(runs)  # so that an interrupted campaign has tried some of each
        verdicts: list[Verdict] = []

        def tell(verdict: Verdict) -> None:
            verdicts.append(verdict)
            _tell(verdict)

        try:
            await disturbed(opened, runs, reference, tell)
        finally:  # also if it is interrupted
            _print_table(verdicts)
            num_wrong = sum(bool(verdict.wrong) for verdict in verdicts)
            seconds = time.monotonic() - begun
            print(f"{len(verdicts)} of {len(runs)} runs in {seconds:.0f} s, {num_wrong} wrong", flush=True)
    return 1 if num_wrong else 0


def _tell(verdict: Verdict) -> None:
    print(verdict, flush=True)


def _print_table(verdicts: list[Verdict]) -> None:
    """Print how many runs of each kind were made, wrong and not reached."""
    kinds = list(dict.fromkeys(verdict.outcome.disturbance.kind for verdict in verdicts))
    table = Table("", *kinds, "all", title="Runs (wrong, not reached)")
    for scenario in (*dict.fromkeys(verdict.outcome.scenario for verdict in verdicts), None):
        of_row = [v for v in verdicts if scenario in (v.outcome.scenario, None)]
        cells = [_cell([v for v in of_row if v.outcome.disturbance.kind is kind]) for kind in kinds]
        table.add_row(scenario or "all", *cells, _cell(of_row))
    Console(width=118).print(table)


def _cell(verdicts: list[Verdict]) -> str:
    num_wrong = sum(bool(v.wrong) for v in verdicts)
    num_missed = sum(not v.wrong and not v.outcome.is_hit for v in verdicts)
    return f"{len(verdicts)} ({num_wrong}, {num_missed})"


raise SystemExit(main())
