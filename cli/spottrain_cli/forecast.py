"""How long a job takes and what it costs, by a rate of interruptions.

`spottrain simulate` says the same by a trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.capacity import MAX_MEMBERS
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_cli.api_access import UserError
from spottrain_operator.core.facts.costs import price
from spottrain_operator.core.facts.demand import demand

_HOUR = 3600.0
# Commits of a job whose interval is auto, in seconds.
_AUTO_COMMIT = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a job has to do, and what it has to reckon with. Times are in seconds.

    Attributes:
        steps: Number of steps.
        step_seconds: A step on `nodes` nodes. On half as many it takes twice as long.
        interruptions: How often the cloud takes a spot node, a day.
        restart_seconds: Without a step for a change of members.
        node_seconds: Until another node takes the place of one that went.
        limit: Time by which the job is to finish.
        budget: Money that it may cost.
    """

    steps: int
    step_seconds: float
    nodes: int
    interruptions: float
    restart_seconds: float
    node_seconds: float
    limit: float | None = None
    budget: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """How a job is expected to fare on some nodes."""

    name: str
    seconds: float
    gpu_hours: float
    cost: float
    interruptions: float
    commits: float

    def meets(self, run: Run) -> bool:
        in_time = run.limit is None or self.seconds <= run.limit
        return in_time and (run.budget is None or self.cost <= run.budget)


def forecasts(spec: TrainingJobSpec, run: Run) -> tuple[Forecast, Forecast]:
    """The job on on-demand nodes alone, and as it is."""
    wanted = demand(spec)
    on_demand = _forecast("on-demand alone", spec, run, spec.nodes.max, 0)
    return on_demand, _forecast("as the job is", spec, run, wanted.on_demand, wanted.spot)


def _forecast(name: str, spec: TrainingJobSpec, run: Run, num_on_demand: int, num_spot: int) -> Forecast:
    """Each interruption costs two restarts, without the node and with its replacement, and the node in between."""
    num_nodes = num_on_demand + num_spot
    work = run.steps * run.step_seconds * run.nodes / num_nodes
    lost = 2 * run.restart_seconds + run.node_seconds / num_nodes
    rate = run.interruptions * num_spot / (24 * _HOUR)
    seconds = (work + run.restart_seconds) / (1 - rate * lost) if rate * lost < 1 else math.inf
    hours = seconds / _HOUR
    cost = sum(num and hours * num * _price(spec, kind) for kind, num in _by_kind(num_on_demand, num_spot))
    return Forecast(
        name=name,
        seconds=seconds,
        gpu_hours=hours * num_nodes * spec.processes_per_node,
        cost=cost,
        interruptions=rate * seconds,
        commits=seconds / _commit_seconds(spec, run),
    )


def _by_kind(num_on_demand: int, num_spot: int) -> list[tuple[CapacityType, int]]:
    return [(CapacityType.ON_DEMAND, num_on_demand), (CapacityType.SPOT, num_spot)]


def _price(spec: TrainingJobSpec, kind: CapacityType) -> float:
    found = price(spec.capacity, kind, None)
    if found is None:
        field = "onDemand" if kind is CapacityType.ON_DEMAND else "spot"
        raise UserError(f"{kind.value} nodes have no price. Set capacity.{field}.pricePerHour in the job.")
    return found


def _commit_seconds(spec: TrainingJobSpec, run: Run) -> float:
    interval = spec.checkpoint.interval
    return interval.steps * run.step_seconds if interval.steps else float(interval.seconds or _AUTO_COMMIT)


def smallest_change(spec: TrainingJobSpec, run: Run) -> str:
    """The first change with which the job meets its limits, as a sentence; empty if it does as it is."""
    if forecasts(spec, run)[1].meets(run):
        return ""
    for text, changed in _changes(spec):
        if forecasts(changed, run)[1].meets(run):
            return f"The smallest change with which it meets that: {text}."
    fewer = _fewer_steps(spec, run)
    return f"No other number of nodes, nor fewer on-demand nodes, meets that. As it is, it can make {fewer:,} steps."


def _changes(spec: TrainingJobSpec) -> Iterator[tuple[str, TrainingJobSpec]]:
    """Fewer on-demand nodes first, as that disturbs nothing else, and then more nodes."""
    floor, most = spec.capacity.on_demand.floor(spec.nodes.max), spec.batch.global_ // spec.processes_per_node
    for minimum in range(floor - 1, -1, -1):
        yield f"capacity.onDemand.min {minimum}", _changed(spec, minimum, spec.nodes.max)
    for maximum in range(spec.nodes.max + 1, min(most, MAX_MEMBERS) + 1):
        yield f"nodes.max {maximum}", _changed(spec, floor, maximum)
    for maximum in range(spec.nodes.max + 1, min(most, MAX_MEMBERS) + 1) if floor else ():
        yield f"nodes.max {maximum} and capacity.onDemand.min 0", _changed(spec, 0, maximum)


def _changed(spec: TrainingJobSpec, minimum: int, maximum: int) -> TrainingJobSpec:
    capacity = spec.capacity
    on_demand = capacity.on_demand.model_copy(update={"min": minimum})
    spot = capacity.spot.model_copy(update={"max": None})
    return spec.model_copy(
        update={
            "nodes": spec.nodes.model_copy(update={"max": maximum}),
            "capacity": capacity.model_copy(update={"on_demand": on_demand, "spot": spot}),
        }
    )


def _fewer_steps(spec: TrainingJobSpec, run: Run) -> int:
    now = forecasts(spec, run)[1]
    shares = [1.0]
    shares += [run.limit / now.seconds] if run.limit is not None else []
    shares += [run.budget / now.cost] if run.budget is not None and now.cost else []
    return int(run.steps * min(shares))


def forecast_view(name: str, spec: TrainingJobSpec, run: Run) -> RenderableType:
    """Draw the table, and what to change if a limit is not met."""
    rows, currency = forecasts(spec, run), spec.capacity.currency
    if math.isinf(rows[1].seconds):
        raise UserError(
            "With so many interruptions, spot nodes make no progress: the restarts take all the time. Lower "
            "--interruptions, or give the job more on-demand nodes."
        )
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", collapse_padding=True)
    table.add_column(name, no_wrap=True)
    for column in ("Days", "GPU hours", f"Cost {currency}", "Interruptions", "Commits"):
        table.add_column(column, justify="right")
    for each in rows:
        days = f"{each.seconds / _HOUR / 24:,.1f}"
        numbers = (f"{each.interruptions:,.0f}", f"{each.commits:,.0f}")
        table.add_row(each.name, days, f"{each.gpu_hours:,.0f}", f"{each.cost:,.2f}", *numbers)
    says = [
        f"{run.steps:,} steps of {run.step_seconds:g} s on {run.nodes} nodes; each spot node is taken "
        f"{run.interruptions:g} times a day, and each time costs two restarts of {run.restart_seconds:g} s.",
        _limits(rows[1], run, currency),
        smallest_change(spec, run),
    ]
    return Group(table, Text(), Text("\n".join(filter(None, says))))


def _limits(forecast: Forecast, run: Run, currency: str) -> str:
    missed = []
    if run.limit is not None and forecast.seconds > run.limit:
        missed.append(f"takes longer than {run.limit / _HOUR:,.1f} h")
    if run.budget is not None and forecast.cost > run.budget:
        missed.append(f"costs more than {run.budget:,.2f} {currency}")
    return f"The job {' and '.join(missed)}." if missed else ""
