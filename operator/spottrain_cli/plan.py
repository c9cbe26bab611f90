"""`spottrain plan`: the memory that a job needs by strategy, before anything is paid for. No cluster is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import click
import yaml
from pydantic import ValidationError
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from spottrain_api.contract import KIND
from spottrain_api.memory_estimate import (
    RUNTIME_BYTES,
    Estimate,
    ModelFacts,
    Workload,
    estimates,
    in_gib,
)
from spottrain_api.strategy_choice import Choice, Memory, choose_strategy, fits, usable_bytes
from spottrain_api.v1alpha1 import Sharding, Strategy, TrainingJobSpec

from .job_view import UserError
from .model_facts import count, read_config, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The estimates of a job at its smallest and its largest number of nodes, in the same order."""

    name: str
    spec: TrainingJobSpec
    smallest: Workload
    largest: Workload
    memory: Memory
    choice: Choice

    @property
    def rows(self) -> list[tuple[Estimate, Estimate]]:
        return list(zip(estimates(self.smallest), estimates(self.largest), strict=True))


@click.command("plan")
@click.argument("file", type=click.File())
@click.option("--parameters", metavar="COUNT", help="Of the model, such as 7B.")
@click.option("--config", type=click.Path(path_type=Path), help="The model's config.json, as Hugging Face has it.")
@click.option("--hidden", type=click.IntRange(min=1), help="Hidden units of a transformer.")
@click.option("--layers", type=click.IntRange(min=1), help="Layers of a transformer.")
@click.option("--vocabulary", type=click.IntRange(min=1), help="Size of the vocabulary, whose logits take memory.")
@click.option("--sequence-length", type=click.IntRange(min=1), help="Tokens in a sample.")
@click.option("--accelerator-memory", metavar="SIZE", required=True, help="Of one accelerator, such as 80GiB.")
@click.option("--host-memory", metavar="SIZE", help="Of one node, which bounds what is kept on the CPU.")
def plan(
    file: IO[str],
    parameters: str | None,
    config: Path | None,
    hidden: int | None,
    layers: int | None,
    vocabulary: int | None,
    sequence_length: int | None,
    accelerator_memory: str,
    host_memory: str | None,
) -> None:
    """Estimate the memory of the TrainingJob in FILE (- for standard input), and show what `strategy: auto` picks.

    The model is in your script, so say how large it is: with --parameters, or with the --config of a Hugging Face
    model. With --sequence-length, activations are estimated too.
    """
    name, spec = read_job(file)
    facts = _facts(parameters, config, {"hidden": hidden, "layers": layers, "vocabulary": vocabulary})
    host = size(host_memory) // spec.processes_per_node if host_memory else None
    memory = Memory(accelerator_bytes=size(accelerator_memory), host_bytes=host)
    Console().print(plan_view(make_plan(name, spec, facts, memory, sequence_length=sequence_length)))


def read_job(file: IO[str]) -> tuple[str, TrainingJobSpec]:
    """The name and the spec of the one TrainingJob in a YAML file. Raises UserError."""
    try:
        documents = [document for document in yaml.safe_load_all(file) if document]
    except yaml.YAMLError as error:
        raise UserError(f"{file.name} is not YAML: {error}") from error
    jobs = [document for document in documents if isinstance(document, dict) and document.get("kind") == KIND]
    if len(jobs) != 1:
        raise UserError(f"{file.name} has {len(jobs)} TrainingJobs; give a file with one.")
    try:
        spec = TrainingJobSpec.model_validate(jobs[0].get("spec"))
    except ValidationError as error:
        wrong = "; ".join(f"spec.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError(f"The job in {file.name} is wrong: {wrong}.") from error
    if spec.nodes.min > spec.nodes.max:
        raise UserError("nodes.min is larger than nodes.max; lower min or raise max.")
    return str(jobs[0].get("metadata", {}).get("name", "the job")), spec


def _facts(parameters: str | None, config: Path | None, dimensions: dict[str, int | None]) -> ModelFacts:
    given: dict[str, Any] = {name: value for name, value in dimensions.items() if value is not None}
    if parameters is not None:
        given["num_parameters"] = count(parameters)
    if config is not None:
        return replace(read_config(config), **given)
    if parameters is None:
        raise UserError("Say how large the model is: --parameters 7B, or --config with the model's config.json.")
    return ModelFacts(**given)


def make_plan(
    name: str, spec: TrainingJobSpec, facts: ModelFacts, memory: Memory, *, sequence_length: int | None
) -> Plan:
    """The strategy has to fit the smallest number of nodes: that is what auto reckons with."""
    smallest = Workload(
        model=facts,
        micro_batch=spec.batch.micro,
        world_size=spec.nodes.min * spec.processes_per_node,
        precision=spec.precision.value,
        sequence_length=sequence_length,
        activation_checkpointing=spec.activation_checkpointing,
        fsdp_ranks=spec.processes_per_node if spec.fsdp.sharding is Sharding.HYBRID else None,
    )
    largest = replace(smallest, world_size=spec.nodes.max * spec.processes_per_node)
    wanted = spec.deepspeed.zero_stage
    choice = choose_strategy(smallest, memory, allowed=lambda e: wanted is None or e.zero_stage in (None, wanted))
    return Plan(name=name, spec=spec, smallest=smallest, largest=largest, memory=memory, choice=choice)


def plan_view(plan: Plan) -> RenderableType:
    """The table, and in words what auto picks and what the job says."""
    smallest, largest = plan.smallest, plan.largest
    facts = smallest.model
    hidden, layers = facts.proportions()
    tokens = f"{smallest.sequence_length:,} tokens each" if smallest.sequence_length else "of unknown length"
    head = Text.assemble(
        (plan.name, "bold"),
        f": {facts.num_parameters:,} parameters ({layers} layers of {hidden}), {smallest.precision}, "
        f"{smallest.micro_batch} samples at once {tokens}, {smallest.world_size} to {largest.world_size} ranks\n",
    )
    return Group(head, _table(plan), Text(), _verdict(plan))


def _table(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("Strategy")
    for column in ("Weights", "Gradients", "Optimizer", "Activations", "Working"):
        table.add_column(column, justify="right")
    for workload in (plan.smallest, plan.largest):
        table.add_column(f"At {workload.world_size}", justify="right")
    table.add_column("On the CPU", justify="right")
    table.add_column("")
    for least, most in plan.rows:
        chosen = least == plan.choice.estimate
        parts = (least.parameters, least.gradients, least.optimizer, least.activations, least.working + RUNTIME_BYTES)
        table.add_row(
            least.name,
            *map(in_gib, parts),
            _judged(least, plan.smallest, plan.memory),
            _judged(most, plan.largest, plan.memory),
            in_gib(least.host) if least.host else "",
            "← auto" if chosen else "",
            style="bold" if chosen else "",
        )
    return table


def _judged(estimate: Estimate, workload: Workload, memory: Memory) -> Text:
    does_fit = fits(estimate, workload, memory)
    return Text(f"{in_gib(estimate.total)} {'✓' if does_fit else '✗'}", "green" if does_fit else "red")


def _verdict(plan: Plan) -> Text:
    room, whole = usable_bytes(plan.smallest, plan.memory), plan.memory.accelerator_bytes
    says = [
        f"Weights to working, and what the CPU holds, are of each of {plan.smallest.world_size} ranks. ✓: fits "
        f"{in_gib(room)}, which is planned with of {in_gib(whole)}.",
        f"auto: {plan.choice.reason} {plan.choice.remedy}".strip(),
    ]
    if plan.smallest.sequence_length is None:
        says.append("Give --sequence-length to have activations estimated.")
    if plan.spec.strategy is not Strategy.AUTO:
        says.append(f"The job names the strategy {plan.spec.strategy.value}, which is used whatever fits.")
    return Text("\n".join(says))
