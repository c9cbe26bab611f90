"""`spottrain plan`: estimate the memory of a job by strategy before it runs.

No cluster is needed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import click
import yaml
from pydantic import ValidationError
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from spottrain_api.contract.names import KIND
from spottrain_api.mistakes import mistakes
from spottrain_api.settings.choices import Strategy
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_cli.api_access import UserError
from spottrain_cli.durations import Duration
from spottrain_cli.forecast import Run, forecast_view
from spottrain_cli.model_facts import count, read_config, size
from spottrain_planner.batch_sizes import sizes_that_differ
from spottrain_planner.deepspeed_json import user_json, zero_optimization
from spottrain_planner.memory_estimate import (
    DEEPSPEED,
    GIB,
    PIECE_BYTES,
    RUNTIME_BYTES,
    Estimate,
    ModelFacts,
    estimates,
    in_gib,
)
from spottrain_planner.refusals import refusals
from spottrain_planner.strategy_choice import Choice, fits, host_needed, usable_bytes, usable_share
from spottrain_planner.what_fits import MOST_NODES, Hardware, PlannedJob, differences, smallest_change
from spottrain_runtime.wording import counted

# Columns of a terminal in which any table fits, for measuring.
WIDE = 1000


@click.command("plan")
@click.argument("file", type=click.File(encoding="utf-8"))
@click.option("--parameters", metavar="COUNT", help="Number of parameters of the model, such as 7B.")
@click.option(
    "--config", type=click.Path(path_type=Path), help="Path of the model's config.json, in Hugging Face's form."
)
@click.option("--hidden", type=click.IntRange(min=1), help="Number of hidden units of a transformer.")
@click.option("--layers", type=click.IntRange(min=1), help="Number of layers of a transformer.")
@click.option("--vocabulary", type=click.IntRange(min=1), help="Size of the vocabulary. Its logits take memory.")
@click.option(
    "--sequence-length",
    type=click.IntRange(min=1),
    help="Number of tokens in a sample, for the memory of activations.",
)
@click.option(
    "--accelerator-memory",
    metavar="SIZE",
    help="Memory of one accelerator, such as 80GiB. It may be left out with --steps or --tokens.",
)
@click.option(
    "--host-memory",
    metavar="SIZE",
    help="Memory of one node, such as 1000GiB. Each rank builds the model there. Default: enough.",
)
@click.option("--steps", type=click.IntRange(min=1), help="Number of steps, to plan days and money.")
@click.option("--tokens", metavar="COUNT", help="Number of tokens, such as 300B. It needs --sequence-length.")
@click.option("--step-time", type=Duration(), help="Time of a step on nodes.max nodes, such as 12s.")
@click.option(
    "--interruptions",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="How often the cloud takes a spot node, a day.",
)
@click.option("--restart-time", type=Duration(), default="30s", show_default=True, help="Time to a first step.")
@click.option("--node-time", type=Duration(), default="10m", show_default=True, help="Time until a node is replaced.")
@click.option("--finish-within", type=Duration(), help="Time that the job may take, such as 10d.")
@click.option("--budget", type=click.FloatRange(min=0.01), help="Money that it may cost. Default: budget.maxCost.")
def plan(
    file: IO[str],
    parameters: str | None,
    config: Path | None,
    hidden: int | None,
    layers: int | None,
    vocabulary: int | None,
    sequence_length: int | None,
    accelerator_memory: str | None,
    host_memory: str | None,
    steps: int | None,
    tokens: str | None,
    step_time: float | None,
    interruptions: float,
    restart_time: float,
    node_time: float,
    finish_within: float | None,
    budget: float | None,
) -> None:
    """Plan the TrainingJob in FILE: its memory by strategy, and with --steps or --tokens days and money.

    The output also shows what `strategy: auto` chooses.

    FILE is a YAML file, or - for standard input. Give the size of your model with --parameters, or with the --config
    of a Hugging Face model. --sequence-length adds the memory of activations.

    With --steps or --tokens, and --step-time, the output shows days, GPU hours and money on on-demand nodes alone and
    as the job is, with the smallest change that meets --finish-within and the budget.
    """
    name, spec = read_job(file)
    console = Console()
    num_steps = _num_steps(spec, steps, tokens, sequence_length)
    if num_steps is not None:
        if step_time is None or step_time <= 0:
            raise UserError(
                "The time of a step is missing. Give --step-time, such as 12s, as status and logs show it."
            )
        maximum = spec.budget.max_cost if budget is None and spec.budget is not None else budget
        run = Run(
            steps=num_steps,
            step_seconds=step_time,
            nodes=spec.nodes.max,
            interruptions=interruptions,
            restart_seconds=restart_time,
            node_seconds=node_time,
            limit=finish_within,
            budget=maximum,
        )
        console.print(forecast_view(name, spec, run))
        if accelerator_memory is None:
            return
        console.print()
    if accelerator_memory is None:
        raise UserError(
            "The accelerator is missing. Give --accelerator-memory, such as 80GiB, or --steps for days and money."
        )
    facts = _facts(parameters, config, {"hidden": hidden, "layers": layers, "vocabulary": vocabulary})
    hardware = Hardware(
        accelerator_bytes=size(accelerator_memory), node_bytes=size(host_memory) if host_memory else None
    )
    training = PlannedJob(spec=spec, model=facts, hardware=hardware, sequence_length=sequence_length)
    console.print(plan_view(name, training, console.width))


def _num_steps(spec: TrainingJobSpec, steps: int | None, tokens: str | None, length: int | None) -> int | None:
    """The steps to plan days and money for; None if that isn't asked for."""
    if steps is not None and tokens is not None:
        raise UserError("Give either --steps or --tokens.")
    if tokens is None:
        return steps
    if length is None:
        raise UserError("How many tokens a step has is not known. Give --sequence-length, the tokens of a sample.")
    return math.ceil(count(tokens) / (spec.batch.global_ * length))


def read_job(file: IO[str]) -> tuple[str, TrainingJobSpec]:
    """Read the name and the spec of the one TrainingJob in a YAML file.

    Raises:
        UserError: The file does not hold exactly one job, or the job is invalid.
    """
    try:
        documents = [document for document in yaml.safe_load_all(file) if document]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file.name} is not YAML: {error}") from error
    jobs = [document for document in documents if isinstance(document, dict) and document.get("kind") == KIND]
    if len(jobs) != 1:
        raise UserError(f"{file.name} has {counted(len(jobs), 'TrainingJob')}. Give a file with exactly one.")
    try:
        spec = TrainingJobSpec.model_validate(jobs[0].get("spec"))
    except ValidationError as error:
        raise UserError(f"The job in {file.name} is invalid. {mistakes(error, 'spec')}") from error
    if refused := refusals(spec):
        raise UserError(f"The job in {file.name} is invalid. {' '.join(f'{each}.' for each in refused)}")
    try:
        user = user_json(spec.deepspeed.config)
        if spec.strategy is Strategy.DEEPSPEED:
            zero_optimization(spec.deepspeed, user)
    except ValueError as error:
        raise UserError(f"The job in {file.name} is invalid: {error}.") from error
    metadata = jobs[0].get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return str(name or "the job"), spec


def _facts(parameters: str | None, config: Path | None, dimensions: dict[str, int | None]) -> ModelFacts:
    given: dict[str, Any] = {name: value for name, value in dimensions.items() if value is not None}
    if parameters is not None:
        given["num_parameters"] = count(parameters)
    if config is not None:
        return replace(read_config(config), **given)
    if parameters is None:
        raise UserError(
            "The size of the model is missing. Give --parameters, such as 7B, or --config with its config.json."
        )
    return ModelFacts(**given)


def plan_view(name: str, training: PlannedJob, width: int) -> RenderableType:
    """Draw the table, what auto chooses, and what to change if the job does not fit.

    If the whole table does not fit the terminal of `width` columns, the parts of a step are left out.
    """
    smallest, spec = training.workload(), training.spec
    hidden, layers = training.model.proportions()
    tokens = f"{counted(smallest.sequence_length, 'token')} each" if smallest.sequence_length else "of unknown length"
    ranks = counted(spec.nodes.max * spec.processes_per_node, "rank")
    if spec.nodes.min < spec.nodes.max:
        ranks = f"{smallest.world_size:,} to {ranks}"
    head = Text.assemble(
        (name, "bold"),
        f": {training.model.num_parameters:,} parameters ({counted(layers, 'layer')} of {hidden}), "
        f"{smallest.precision}, {counted(smallest.micro_batch, 'sample')} at once {tokens}, {ranks}\n",
    )
    choice = training.choice()
    whole = _table(training, choice, is_whole=True)
    table = whole if _width_of(whole) <= width else _table(training, choice, is_whole=False)
    return Group(head, table, Text(), _verdict(training, choice))


def _width_of(table: Table) -> int:
    """Measure the columns of a terminal in which no cell of the table is cut."""
    console = Console(width=WIDE)
    return console.measure(table).maximum


def _table(training: PlannedJob, choice: Choice, *, is_whole: bool) -> Table:
    """Build the table, one row for each strategy.

    The parts of a step are those at the smallest world size.
    """
    workloads = [training.workload(number) for number in sorted({training.spec.nodes.min, training.spec.nodes.max})]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", collapse_padding=True)
    table.add_column("GiB a rank", no_wrap=True)
    parts = ("Weights", "Grads", "Optim", "Activ", "Work") if is_whole else ()
    peaks = [f"At {workload.world_size}" for workload in workloads]
    for column in (*parts, "Start", *peaks, "Host"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in zip(*map(estimates, workloads), strict=True):
        least, chosen = row[0], row[0] == choice.estimate
        working = least.working + RUNTIME_BYTES
        kept = (least.parameters, least.gradients, least.optimizer, least.activations, working)
        table.add_row(
            _short_name(least),
            *(_gib(part) for part in kept[: len(parts)]),
            _gib(least.start + RUNTIME_BYTES),
            *(_judged(training, number) for number in zip(row, workloads, strict=True)),
            _gib(host_needed(least, workloads[0], training.memory())),
            "← auto" if chosen else "",
            style="bold" if chosen else "",
        )
    return table


def _short_name(estimate: Estimate) -> str:
    name = f"ZeRO {estimate.zero_stage}" if estimate.strategy == DEEPSPEED else estimate.strategy
    kept = "all" if estimate.offload_parameters else "opt" if estimate.offload_optimizer else ""
    return f"{name}, {kept} CPU" if kept else name


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}" if num_bytes < 99.95 * GIB else f"{num_bytes / GIB:.0f}"


def _judged(training: PlannedJob, at: tuple[Estimate, Any]) -> Text:
    estimate, workload = at
    does_fit = fits(estimate, workload, training.memory())
    return Text(f"{_gib(estimate.total)} {'✓' if does_fit else '✗'}", "green" if does_fit else "red")


def _verdict(training: PlannedJob, choice: Choice) -> Text:
    spec, smallest, memory = training.spec, training.workload(), training.memory()
    processes, num_ranks = spec.processes_per_node, smallest.world_size
    share = "" if memory.host_bytes is None else f", of which a rank has {in_gib(memory.host_bytes)}"
    says = [
        f"For each of {counted(num_ranks, 'rank')}; At {num_ranks} is the peak. ✓: fits "
        f"{in_gib(usable_bytes(smallest, memory))}, the usable part of {in_gib(memory.accelerator_bytes)}. The peak, "
        f"Work and Start include {in_gib(RUNTIME_BYTES)} for CUDA and NCCL.",
        f"Start: peak while the model is spread. Host: peak of the node's memory{share}. Each rank builds the whole "
        f"model there first: {in_gib(processes * smallest.model.built)} on a node of {processes}. Later it stages "
        f"its share of each checkpoint there: {in_gib(choice.estimate.staging)}, or pieces of "
        f"{PIECE_BYTES >> 20} MiB if there is no room for that.",
        "opt CPU: the optimizer state is in the node's memory. all CPU: gradients and weights are there, too.",
        f"auto: {choice.reason}",
    ]
    worlds = range(num_ranks, spec.nodes.max * processes + 1, processes)
    differing = sizes_that_differ(spec.batch.global_, spec.batch.micro, worlds)
    if differing is not None and spec.batch.multiple_of == 1:
        says.append(differing)
    if smallest.sequence_length is None:
        says.append("Give --sequence-length to include activations.")
    named = training.named()
    if spec.strategy is not Strategy.AUTO:
        judged = "" if named.fits else f" {named.reason.replace('Nothing fits', 'It does not fit', 1)}"
        says.append(
            f"The job names the strategy {spec.strategy.value}, which is used even if it does not fit.{judged}"
        )
    if not named.fits:
        says.append(_advice(training, named))
    return Text("\n".join(says))


def _advice(training: PlannedJob, lacking: Choice) -> str:
    """Name the smallest change with which the job fits."""
    changed, processes = smallest_change(training), training.spec.processes_per_node
    if changed is None:
        least = lacking.estimate
        accelerator = int(least.total / usable_share(training.workload()))
        return (
            "None of these changes makes it fit: a smaller batch.micro, activationCheckpointing, precision bf16, "
            f"{max(MOST_NODES, training.spec.nodes.max)} nodes, fewer processesPerNode. As it is, it needs "
            f"accelerators of {in_gib(accelerator)} and nodes of {in_gib(least.host_in_pieces * processes)}."
        )
    fields = " and ".join(differences(training.spec, changed.spec))
    fitting, num_ranks = changed.named().estimate, changed.workload().world_size
    return (
        f"The smallest change that fits: {fields}. On {counted(num_ranks, 'rank')} {fitting.name} then needs "
        f"{in_gib(fitting.total)} of {in_gib(changed.memory().accelerator_bytes)}."
    )
