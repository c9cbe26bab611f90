"""Benchmark: the operator's delay for notices under a flood of bogus tokens.

`make bench-control-api` uses the world of `make bench-operator`: a real API server, the operator as a process, and
agents without ranks. Some nodes get a notice at once, again and again. It measures the seconds until each member of
their jobs is assigned to drain. Every other round, a process sends 1,000 bogus tokens a second over TLS (see
control_api/flood.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import clean_up_on_sigterm
from benchmarks.scale.world import Bench, percentile, say, world
from spottrain_local.processes import watch_children_by_pidfd

TOKENS_PER_SECOND = 1000.0
# Agents that take up their assignments have settled by then.
SETTLE_SECONDS = 5.0
Samples = dict[str, list[float]]


@asynccontextmanager
async def flood(bench: Bench, results: list[dict[str, Any]]) -> AsyncIterator[None]:
    """Send bogus tokens for a pod that exists. Appends what was answered."""
    arguments = [bench.operator.url, bench.operator.authority, next(iter(bench.agents)), str(TOKENS_PER_SECOND)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.control_api.flood", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield
    finally:
        process.terminate()
        printed, _ = await process.communicate()
    results.append(json.loads(printed))


async def measure(args: argparse.Namespace, folder: Path) -> tuple[Samples, list[dict[str, Any]]]:
    """Rounds of notices, quiet and under the flood in turn."""
    measured: Samples = {"quiet": [], "flood": []}
    floods: list[dict[str, Any]] = []
    async with world(folder, num_jobs=args.jobs, num_members=args.members) as (bench, _):
        for number in range(args.rounds):
            await asyncio.sleep(SETTLE_SECONDS)
            measured["quiet"] += (await bench.notices())["seconds"]
            async with flood(bench, floods):
                await asyncio.sleep(SETTLE_SECONDS)
                measured["flood"] += (await bench.notices())["seconds"]
            say(f"round {number + 1} of {args.rounds}: {floods[-1]}")
    return measured, floods


def table(measured: Samples, floods: list[dict[str, Any]]) -> Table:
    """A row for each kind of round."""
    columns = ("Round", "Bogus tokens a second", "Samples", "p50", "Ratio", "p99", "Ratio")
    rows = Table(*columns, title="Seconds from a notice to the assignment to drain")
    sent = {"quiet": 0.0, "flood": statistics.mean(each["per_second"] for each in floods)}
    of_quiet = [percentile(sorted(measured["quiet"]), share) for share in (0.5, 0.99)]
    for name, seconds in measured.items():
        numbers = [percentile(sorted(seconds), share) for share in (0.5, 0.99)]
        cells = [
            f"{each:.2f}" for pair in zip(numbers, of_quiet, strict=True) for each in (pair[0], pair[0] / pair[1])
        ]
        rows.add_row(name, f"{sent[name]:.0f}", str(len(seconds)), *cells)
    return rows


def main() -> int:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--rounds", type=int, default=5, help="of each kind")
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--members", type=int, default=4, help="of each job")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    watch_children_by_pidfd()
    with tempfile.TemporaryDirectory(prefix="spottrain-bench-") as folder:
        try:
            measured, floods = asyncio.run(measure(args, Path(folder)))
        except TimeoutError as error:
            print(f"bench_control_api: {error}", file=sys.stderr)
            return 2
    Console(width=110).print(table(measured, floods))
    (args.out / "control-api.json").write_text(json.dumps({"seconds": measured, "floods": floods}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
