"""Benchmark of the operator with many jobs: at rest, with notices, at a restart.

`make bench-operator` starts a real API server with etcd and the operator as a process. A driver plays scheduler,
kubelets and autoscaler through the API. The agents have no ranks, but run the agent's own state machine, and speak
the control API as it is, in as many processes as the limit of open files makes necessary. Three parts, one after the
other:

- rest: all jobs train. Requests that the API server has answered, by its own count, and the operator's processor time
  and memory. By default it is as long as the pause between two writes of a job's history.
- notices: a tenth of the nodes, at random, get a notice at once. Seconds until each member of their jobs is assigned
  to drain.
- restart: the operator is killed and started again. Seconds until it is ready, and until an agent of each job has its
  assignment, and how many of them are the operator's processor time. The rest is that of the others on this machine.

`--python` names an interpreter for the operator that has no more packages than the operator's image, as `make
bench-operator` does.

`--label` names the run in bench-out/operator-LABEL.json; `--plot A.json B.json` draws several runs side by side.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks import clean_up_on_sigterm
from benchmarks.scale.world import Result, percentile, say, world
from spottrain_local.processes import watch_children_by_pidfd
from spottrain_operator.core.timing import DEFAULT_TIMING
from spottrain_operator.process import RECORDS_PER_HISTORY
from spottrain_runtime.processes import open_many_files


async def measure(args: argparse.Namespace, folder: Path) -> Result:
    """All parts in one world."""
    sizes = {"num_jobs": args.jobs, "num_members": args.members, "num_finished": args.finished}
    async with world(folder, **sizes, hosts=args.hosts, python=args.python) as (bench, started):
        await asyncio.sleep(args.settle)
        result: Result = {"jobs": args.jobs, "members": args.members, "finished": args.finished, "start": started}
        for name, part in (
            ("rest", lambda: bench.rest(args.seconds, args.jobs)),
            ("notices", bench.notices),
            ("restart", lambda: bench.restart(args.jobs)),
        ):
            if name in args.parts:
                result[name] = await part()
                say(f"{name}: {summary(result[name])}")
        return result


def summary(result: Result) -> str:
    return json.dumps({key: value for key, value in result.items() if key != "seconds"})


def table(results: dict[str, Result]) -> Table:
    """A column for each run."""
    rows = Table("", *results, title="The operator with many jobs")

    def row(title: str, read: Callable[[Result], str]) -> None:
        cells = []
        for result in results.values():
            with contextlib.suppress(KeyError):
                cells.append(read(result))
                continue
            cells.append("–")
        rows.add_row(title, *cells)

    row("jobs × members", lambda r: f"{r['jobs']} × {r['members']}")
    row("finished jobs beside them", lambda r: str(r["finished"]))
    row("rest: API requests a job and hour", lambda r: f"{r['rest']['requestsPerJobHour']:.0f}")
    row("rest: processor, cores", lambda r: f"{r['rest']['cores']:.2f}")
    row("rest: memory, MiB", lambda r: f"{r['rest']['mebibytes']:.0f}")
    row("rest: reports of agents a second", lambda r: f"{r['rest']['reportsPerSecond']:.1f}")
    row("notices: nodes, jobs", lambda r: f"{r['notices']['nodes']}, {r['notices']['jobs']}")
    row("notice to assignment, p50 (s)", lambda r: f"{statistics.median(r['notices']['seconds']):.2f}")
    row("notice to assignment, p99 (s)", lambda r: f"{percentile(r['notices']['seconds'], 0.99):.2f}")
    row("restart: ready after (s)", lambda r: f"{r['restart']['secondsUntilReady']:.1f}")
    row(
        "restart: an agent of each job is assigned after (s)", lambda r: f"{r['restart']['secondsUntilAssigned']:.1f}"
    )
    row(
        "restart: of these, processor of the operator (s)",
        lambda r: f"{r['restart']['processorSecondsUntilAssigned']:.1f}",
    )
    row("restart: most API requests in a second", lambda r: f"{r['restart']['mostRequestsPerSecond']:.0f}")
    return rows


def plot(results: dict[str, Result], path: Path) -> None:
    """Plot requests at rest as bars, and the share assigned to drain over time."""
    figure, (bars, curves) = plt.subplots(1, 2, figsize=(9, 3.2))
    rests = {label: result["rest"]["requestsPerJobHour"] for label, result in results.items() if "rest" in result}
    bars.barh(list(rests), list(rests.values()), color=[f"C{number}" for number in range(len(rests))])
    bars.set(xscale="log", xlabel="API requests a job and hour, at rest")
    bars.axvline(100, color="#888888", linewidth=0.8)
    for number, (label, result) in enumerate(results.items()):
        if "notices" in result:
            curves.ecdf(result["notices"]["seconds"], label=label, color=f"C{number}")
    curves.set(xlabel="seconds from the notices to the assignment", ylabel="share of the members", xlim=(0, None))
    curves.axvline(1.0, color="#888888", linewidth=0.8)
    curves.legend(fontsize=8)
    for axes in (bars, curves):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    clean_up_on_sigterm()
    watch_children_by_pidfd()
    open_many_files()  # also for the processes of agents
    logging.basicConfig(level=logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--label", default="now", help="name of this run")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--finished", type=int, default=0, help="finished jobs beside them")
    parser.add_argument("--hosts", type=int, default=0, help="processes of agents (0: by the limit of open files)")
    parser.add_argument("--python", default=sys.executable, help="interpreter that runs the operator")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds between the start and the first part")
    parser.add_argument(
        "--seconds",
        type=float,
        default=RECORDS_PER_HISTORY * DEFAULT_TIMING.record_interval,
        help="length of the first part",
    )
    parser.add_argument("--parts", nargs="+", default=["rest", "notices", "restart"])
    parser.add_argument(
        "--plot", nargs="+", type=Path, metavar="JSON", help="compare these runs, and measure nothing"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.plot:
        results = {path.stem.removeprefix("operator-"): json.loads(path.read_text()) for path in args.plot}
    else:
        with tempfile.TemporaryDirectory(prefix="spottrain-bench-", dir=os.environ.get("TMPDIR")) as folder:
            results = {args.label: asyncio.run(measure(args, Path(folder)))}
        (args.out / f"operator-{args.label}.json").write_text(json.dumps(results[args.label], indent=1))
    Console(width=130).print(table(results))
    plot(results, args.out / "operator.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
