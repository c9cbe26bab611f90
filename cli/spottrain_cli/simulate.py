"""`spottrain simulate`: a job's life in a trace of what a cloud had to offer.

No cluster is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

import click
from rich.console import Console
from rich.table import Table

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.capacity import PoolType
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_cli.api_access import UserError
from spottrain_cli.durations import Duration
from spottrain_cli.plan import read_job
from spottrain_operator.core.facts.costs import price
from spottrain_simulator.strategies import (
    Outcome,
    Work,
    all_on_demand,
    oracle,
    simulate,
    uniform_progress,
    with_deadline,
    without_fallback,
)
from spottrain_simulator.trace import HOUR, LONGEST_GAP, TraceError, read_trace
from spottrain_simulator.traced import Cloud

# Commits of a job whose interval is auto: half of what auto chooses at most.
_AUTO_COMMIT_SECONDS = 900.0


@click.command("simulate")
@click.argument("file", type=click.File(encoding="utf-8"))
@click.option(
    "--trace",
    "trace_file",
    type=click.File(encoding="utf-8"),
    required=True,
    help="CSV file with the columns time, pool, nodes and price: what was to be had from when on.",
)
@click.option("--steps", type=click.IntRange(min=1), required=True, help="Number of steps of the job.")
@click.option(
    "--step-time",
    type=Duration(),
    required=True,
    help="Time of a step on nodes.max nodes, such as 12s. On half as many it takes twice as long.",
)
@click.option("--restart-time", type=Duration(), default="30s", show_default=True, help="Time to a first step.")
@click.option("--save-time", type=Duration(), default="10s", show_default=True, help="Time of a commit.")
@click.option("--boot-time", type=Duration(), default="2m", show_default=True, help="Time until a new node is up.")
@click.option(
    "--notice", type=Duration(), default="2m", show_default=True, help="Time from a notice to a node's end."
)
@click.option(
    "--finish-within",
    type=Duration(),
    help="Time that the job has, as with capacity.finishBy, and Uniform Progress and the oracle, too. "
    "Default: no deadline, and these two have as long as the job takes.",
)
@click.option(
    "--longest-gap",
    type=Duration(),
    default=LONGEST_GAP,
    help="Time without a row of a pool that is not yet a hole in the trace. Default: 24h.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Decides which nodes the cloud takes.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw the nodes over time as SVG.")
def simulate_command(
    file: IO[str],
    trace_file: IO[str],
    steps: int,
    step_time: float,
    restart_time: float,
    save_time: float,
    boot_time: float,
    notice: float,
    finish_within: float | None,
    longest_gap: float,
    seed: int,
    picture: Path | None,
) -> None:
    """Run the TrainingJob in FILE through a trace of what a cloud had to offer.

    The operator's own rules decide, in a simulated cloud. The table compares them with on-demand nodes alone, with
    spot nodes that nothing stands in for, with Uniform Progress (NSDI 2024), and with an oracle, which knows the
    future and loses no time to a change of nodes.
    """
    name, spec = read_job(file)
    cloud = _cloud(spec, trace_file, longest_gap, boot_time, notice)
    work = Work(
        steps=steps,
        step_seconds=step_time,
        restart_seconds=restart_time,
        save_seconds=save_time,
        commit_seconds=_commit_seconds(spec, step_time),
    )
    outcomes = list(_outcomes(name, spec, cloud, work, finish_within, seed))
    Console().print(_table(outcomes, spec.capacity.currency, cloud.trace.end))
    if picture is not None:
        # The import of matplotlib takes a second.
        from spottrain_cli.pictures import nodes_picture

        _write(picture, nodes_picture([each for each in outcomes if each.course]))


def _outcomes(
    name: str, spec: TrainingJobSpec, cloud: Cloud, work: Work, finish_within: float | None, seed: int
) -> Iterator[Outcome]:
    if finish_within is None and spec.capacity.finish_by is not None:
        raise UserError("The job has a deadline (capacity.finishBy). Give the time until then: --finish-within 36h.")
    job = simulate(name, with_deadline(spec, finish_within), cloud, work, seed=seed)
    spec = with_deadline(spec, None)
    deadline = finish_within or job.finish or cloud.trace.end
    yield job
    yield simulate("all on-demand", all_on_demand(spec), cloud, work, seed=seed)
    yield simulate("spot, no fallback", without_fallback(spec), cloud, work, seed=seed)
    yield uniform_progress(spec, cloud, work, deadline, seed=seed)
    if (best := oracle(spec, cloud, work, deadline)) is not None:
        yield best


def _cloud(spec: TrainingJobSpec, file: IO[str], longest_gap: float, boot: float, notice: float) -> Cloud:
    capacity = spec.capacity
    kinds = {pool.name: pool.kind for pool in capacity.pools} or {kind.value: kind for kind in CapacityType}
    reserved = {pool.name for pool in capacity.pools if pool.capacity_type is PoolType.RESERVED}
    unlimited = [name for name, kind in kinds.items() if kind is CapacityType.ON_DEMAND and name not in reserved]
    try:
        trace = read_trace(file, list(kinds), unlimited=unlimited, longest_gap=longest_gap)
    except (TraceError, UnicodeDecodeError) as error:
        raise UserError(f"{file.name}: {error}.") from error
    prices = {}
    for pool in unlimited:
        known = price(capacity, CapacityType.ON_DEMAND, pool if capacity.pools else None)
        if known is None and pool not in trace.offers:
            raise UserError(
                "On-demand nodes have no price. Set capacity.onDemand.pricePerHour, or add rows "
                f"for {pool} to the trace."
            )
        prices[pool] = known or 0.0
    return Cloud(trace=trace, prices=prices, boot_seconds=boot, notice_seconds=notice)


def _commit_seconds(spec: TrainingJobSpec, step_seconds: float) -> float:
    interval = spec.checkpoint.interval
    if interval.steps is not None:
        return interval.steps * step_seconds
    return float(interval.seconds or _AUTO_COMMIT_SECONDS)


def _table(outcomes: list[Outcome], currency: str, end: float) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", collapse_padding=True)
    table.add_column("", no_wrap=True)
    for column in ("Finish", f"Cost {currency}", "On-demand h", "Spot h", "Interrupted", "Redone", "Goodput"):
        table.add_column(column, justify="right")
    for each in outcomes:
        finish = f"{each.finish / HOUR:.1f} h" if each.finish is not None else f"not in {end / HOUR:.0f} h"
        lived = (
            f"{each.on_demand_hours:.0f}",
            f"{each.spot_hours:.0f}",
            str(each.interruptions),
            str(each.steps_redone),
            f"{each.goodput:.1%}" if each.goodput is not None else "",
        )
        table.add_row(each.name, finish, f"{each.cost:,.2f}", *(lived if each.course else ("",) * len(lived)))
    return table


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}. Name another file with --picture.") from error
    click.echo(f"Wrote {path}.")
