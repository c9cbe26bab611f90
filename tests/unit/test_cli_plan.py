"""`spottrain plan`: what a person sees before a job runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plan_command import deepspeed, in_one_line, run
from spottrain_planner.memory_estimate import GIB


def rows_of(output: str) -> dict[str, str]:
    """The rows of the table by the name of the strategy."""
    rows = [line.rstrip() for line in output.splitlines() if "✓" in line or "✗" in line]
    return {row[:15].strip(): row for row in rows if not row.startswith("For each of")}


def test_each_strategy_is_estimated_and_the_choice_explained(tmp_path: Path) -> None:
    config = str(tmp_path / "config.json")
    result = run(tmp_path, "--config", config, "--sequence-length", "2048", "--accelerator-memory", "80GiB")
    assert result.exit_code == 0, result.output
    assert "llm: 6,738,411,520 parameters (32 layers of 4096), bf16, 1 sample at once" in result.output
    assert "8 to 32 ranks" in result.output
    rows = rows_of(result.output)
    assert "✗" in rows["ddp"]
    assert rows["fsdp"].endswith("← auto")
    assert rows["fsdp"].count("✓") == 2
    assert "auto: 6.74 billion parameters on 8 ranks need about" in result.output
    assert "Each rank builds the whole model there first: 100.4 GiB on a node of 4." in in_one_line(result.output)


def test_a_job_of_one_rank_is_singular(tmp_path: Path) -> None:
    nodes = {"min": 1, "max": 1}
    arguments = ("--parameters", "350M", "--layers", "1", "--accelerator-memory", "80GiB")
    output = in_one_line(run(tmp_path, *arguments, nodes=nodes, processesPerNode=1).output)
    assert "(1 layer of" in output
    assert "1 sample at once of unknown length, 1 rank GiB" in output
    assert "For each of 1 rank;" in output
    assert "1 ranks" not in output


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("parameters", ["350M", "7B", "400B", "4T", "40T"])
def test_the_table_is_whole_in_a_terminal(parameters: str, columns: int, tmp_path: Path) -> None:
    """No cell is cut or goes on in the next line.

    If there is no room, the parts of a step are left out.
    """
    arguments = ("--parameters", parameters, "--sequence-length", "2048", "--accelerator-memory", "80GiB")
    result = run(tmp_path, *arguments, columns=columns, nodes={"min": 32, "max": 250}, batch={"global": 1000})
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= columns
    assert "…" not in result.output
    (head,) = (line.split() for line in result.output.splitlines() if line.startswith("GiB a rank"))
    has_room = columns >= (120 if parameters.endswith("T") else 80)
    parts = ["Weights", "Grads", "Optim", "Activ", "Work"] if has_room else []
    assert head == ["GiB", "a", "rank", *parts, "Start", "At", "128", "At", "1000", "Host"]
    rows = rows_of(result.output)
    assert len(rows) == 9
    for name, row in rows.items():
        numbers = row.removeprefix(name).replace("← auto", "").replace("✓", "").replace("✗", "").split()
        assert len([float(number) for number in numbers]) == len(parts) + 4, row


@pytest.mark.parametrize("multiple_of", [1, 2])
def test_sizes_of_micro_batches_that_depend_on_the_number_of_nodes_are_said(multiple_of: int, tmp_path: Path) -> None:
    batch = {"global": 128, "micro": 16, "multipleOf": multiple_of}
    arguments = ("--parameters", "350M", "--accelerator-memory", "80GiB")
    output = in_one_line(run(tmp_path, *arguments, nodes={"min": 1, "max": 3}, batch=batch).output)
    said = "Samples of a micro-batch: 16 at 4 and 8 ranks, 10 or 11 at 12 ranks. If the script needs a multiple of a"
    assert (said in output) == (multiple_of == 1)


def test_trillions_are_trillions(tmp_path: Path) -> None:
    result = run(tmp_path, "--parameters", "4T", "--accelerator-memory", "80GiB")
    assert "4 trillion parameters on 8 ranks" in in_one_line(result.output)


def test_the_parts_of_a_row_are_those_of_the_estimate(tmp_path: Path) -> None:
    arguments = ("--parameters", "1B", "--accelerator-memory", "80GiB", "--sequence-length", "2048")
    row = rows_of(run(tmp_path, *arguments).output)["ddp"]
    figures = map(float, row.replace("✓", "").replace("← auto", "").split()[1:])
    weights, gradients, optimizer, activations, working, start, peak, _, host = figures
    assert (weights, gradients, optimizer) == (3.7, 3.7, 7.5)
    assert start == pytest.approx(weights + gradients + 1.5, abs=0.11)
    assert peak == pytest.approx(weights + gradients + optimizer + activations + working, abs=0.3)
    assert host == weights  # each rank builds the model there


def test_what_is_unknown_is_said(tmp_path: Path) -> None:
    result = run(tmp_path, "--parameters", "350M", "--accelerator-memory", "24Gi", strategy="fsdp")
    assert result.exit_code == 0, result.output
    output = in_one_line(result.output)
    assert "Give --sequence-length to include activations." in output
    assert "The job names the strategy fsdp, which is used even if it does not fit." in output


def test_the_host_bounds_what_is_kept_on_the_cpu(tmp_path: Path) -> None:
    arguments = ("--parameters", "70B", "--accelerator-memory", "40GiB", "--sequence-length", "512")
    roomy = run(tmp_path, *arguments, "--host-memory", "2000GiB")
    assert "on the CPU, of 36.8 GiB" in in_one_line(roomy.output)
    small = in_one_line(run(tmp_path, *arguments, "--host-memory", "1000GiB").output)
    assert "Nothing fits: before it is spread, each rank builds the whole model on the CPU" in small
    # What offloads fits the accelerators, but four ranks that build the model don't fit the node.
    assert "The smallest change that fits: processesPerNode: 3 instead of 4." in small


@pytest.mark.parametrize(
    ("parameters", "accelerator", "spec", "sentence"),
    [
        ("7B", "80GiB", {"batch": {"global": 64, "micro": 16}}, "batch.micro: 4 instead of 16. On 8 ranks fsdp"),
        ("7B", "12GiB", {}, "activationCheckpointing: true instead of false. On 8 ranks"),
        (
            "70B",
            "24GiB",
            {"batch": {"global": 64, "micro": 8}},
            "batch.micro: 4 instead of 8 and activationCheckpointing: true instead of false. On 8 ranks",
        ),
        (
            "7B",
            "16GiB",
            {"strategy": "fsdp", "activationCheckpointing": True},
            "nodes.min: 3 instead of 2. On 12 ranks fsdp then needs",
        ),
        (
            "7B",
            "32GiB",
            {"strategy": "deepspeed", "deepspeed": {"zeroStage": 2, "offloadOptimizer": True}, "precision": "fp32"},
            "precision: bf16 instead of fp32. On 8 ranks deepspeed ZeRO 2, optimizer on the CPU then needs",
        ),
        (
            "7B",
            "16GiB",
            {"strategy": "fsdp", "activationCheckpointing": True, "nodes": {"min": 2, "max": 2}},
            "nodes.min: 3 instead of 2 and nodes.max: 3 instead of 2. On 12 ranks",
        ),
        (
            "7B",
            "14GiB",
            {"strategy": "fsdp"},
            "activationCheckpointing: true instead of false and nodes.min: 3 instead of 2. On 12 ranks",
        ),
        (
            "7B",
            "12GiB",
            {"strategy": "fsdp", "batch": {"global": 128, "micro": 16}},
            "batch.micro: 1 instead of 16 and activationCheckpointing: true instead of false and nodes.min: 4 instead"
            " of 2. On 16 ranks",
        ),
        (
            "7B",
            "24GiB",
            {
                "strategy": "deepspeed",
                "deepspeed": {"zeroStage": 2, "offloadOptimizer": True},
                "precision": "fp32",
                "batch": {"global": 64, "micro": 8},
            },
            "batch.micro: 4 instead of 8 and activationCheckpointing: true instead of false and precision: bf16 "
            "instead of fp32. On 8 ranks",
        ),
        ("7B", "20GiB", {"strategy": "fsdp", "precision": "fp32", "activationCheckpointing": True}, "nodes.min: 3"),
        (
            "7B",
            "24GiB",
            {"strategy": "deepspeed", "deepspeed": {"zeroStage": 1, "offloadOptimizer": True}},
            "activationCheckpointing: true instead of false. On 8 ranks deepspeed ZeRO 2, optimizer on the CPU then",
        ),
        (
            "7B",
            "16GiB",
            {"strategy": "deepspeed", "deepspeed": {"zeroStage": 3, "offloadParameters": True}},
            "activationCheckpointing: true instead of false. On 8 ranks deepspeed ZeRO 3, optimizer and parameters",
        ),
        (
            "7B",
            "8GiB",
            {"strategy": "fsdp", "fsdp": {"offload": True}},
            "activationCheckpointing: true instead of false. On 8 ranks fsdp, optimizer and parameters on the CPU",
        ),
        (
            "1B",
            "22GiB",
            {"strategy": "deepspeed", "deepspeed": {"zeroStage": 0}},
            "activationCheckpointing: true instead of false. On 8 ranks ddp then needs",
        ),
    ],
)
def test_if_nothing_fits_the_smallest_change_that_does_is_named(
    parameters: str, accelerator: str, spec: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    arguments = ("--parameters", parameters, "--accelerator-memory", accelerator, "--sequence-length", "2048")
    result = run(tmp_path, *arguments, **spec)
    assert result.exit_code == 0, result.output
    assert f"The smallest change that fits: {sentence}" in in_one_line(result.output)


def test_fewer_ranks_a_node_may_need_smaller_steps_as_well(tmp_path: Path) -> None:
    arguments = ("--parameters", "70B", "--accelerator-memory", "24GiB", "--sequence-length", "2048")
    output = in_one_line(
        run(tmp_path, *arguments, "--host-memory", "1000GiB", batch={"global": 64, "micro": 8}).output
    )
    assert (
        "batch.micro: 4 instead of 8 and activationCheckpointing: true instead of false and processesPerNode: 3 "
        "instead of 4. On 6 ranks" in output
    )


@pytest.mark.parametrize(
    ("memory", "spec", "bound", "change"),
    [
        pytest.param(
            ("--accelerator-memory", "16GiB"),
            {"strategy": "fsdp", "activationCheckpointing": True},
            {"batch": {"global": 8, "micro": 1}, "nodes": {"min": 2, "max": 2}},
            "nodes.min: 3 instead of 2",
            id="a sample for each rank",
        ),
        pytest.param(
            ("--accelerator-memory", "16GiB"),
            {"strategy": "fsdp", "activationCheckpointing": True},
            {"capacity": {"onDemand": {"max": 1}, "spot": {"max": 1}}},
            "nodes.min: 3 instead of 2",
            id="nodes of its capacity",
        ),
        pytest.param(
            ("--accelerator-memory", "160GiB", "--host-memory", "30GiB"),
            {"strategy": "fsdp", "processesPerNode": 2, "nodes": {"min": 4, "max": 16}},
            {"fsdp": {"sharding": "hybrid"}},
            "processesPerNode: 1 instead of 2",
            id="hybrid shards over several ranks",
        ),
    ],
)
def test_a_change_that_the_job_does_not_bear_is_not_named(
    memory: tuple[str, ...], spec: dict[str, Any], bound: dict[str, Any], change: str, tmp_path: Path
) -> None:
    arguments = ("--parameters", "7B", "--sequence-length", "2048", *memory)
    assert f"The smallest change that fits: {change}" in in_one_line(run(tmp_path, *arguments, **spec).output)
    output = in_one_line(run(tmp_path, *arguments, **spec, **bound).output)
    assert "None of these changes makes it fit" in output


def test_if_no_change_helps_it_is_said(tmp_path: Path) -> None:
    arguments = ("--parameters", "7B", "--accelerator-memory", "2GiB", "--sequence-length", "2048")
    output = in_one_line(run(tmp_path, *arguments).output)
    assert (
        "None of these changes makes it fit: a smaller batch.micro, activationCheckpointing, precision bf16, 64"
        in output
    )
    assert "As it is, it needs accelerators of" in output
    assert "The smallest change" not in output


@pytest.mark.parametrize("known", [("--sequence-length", "2048"), ()], ids=["known", "unknown"])
def test_accelerators_of_the_size_that_it_needs_are_enough(known: tuple[str, ...], tmp_path: Path) -> None:
    def said(memory: float) -> str:
        arguments = ("--parameters", "10T", "--accelerator-memory", f"{memory}GiB", *known)
        return in_one_line(run(tmp_path, *arguments, strategy="fsdp").output)

    before, _, after = said(80).partition("it needs accelerators of ")
    assert "It does not fit" in before
    needed = float(after.split()[0].replace(",", ""))
    assert "It does not fit" not in said(needed + 0.1)  # it is rounded
    assert "It does not fit" in said(needed - 0.1)


def test_a_strategy_that_the_job_names_is_judged(tmp_path: Path) -> None:
    arguments = ("--parameters", "7B", "--accelerator-memory", "80GiB", "--sequence-length", "2048")
    assert "The smallest change" not in run(tmp_path, *arguments, strategy="fsdp").output
    output = in_one_line(run(tmp_path, *arguments, strategy="ddp").output)
    assert (
        "The job names the strategy ddp, which is used even if it does not fit. It does not fit: 7 billion" in output
    )
    assert "None of these changes makes it fit:" in output


@pytest.mark.parametrize(
    ("strategy", "fields", "zero"),
    [
        (
            "deepspeed",
            {"zeroStage": 3, "offloadOptimizer": True, "offloadParameters": True},
            {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        ),
        ("deepspeed", {}, {"stage": "auto", "offload_optimizer": {"device": "none"}}),
        ("auto", {"zeroStage": 2}, {"stage": 2}),
    ],
    ids=["offload", "default", "auto"],
)
def test_a_deepspeed_json_counts_as_the_fields_do(
    strategy: str, fields: dict[str, Any], zero: dict[str, Any], tmp_path: Path
) -> None:
    """On 24 GiB, auto would choose ZeRO 3 if the job named no stage."""
    arguments = ("--parameters", "7B", "--accelerator-memory", "24GiB", "--sequence-length", "2048")
    by_fields, by_json = (
        run(tmp_path, *arguments, strategy=strategy, deepspeed=deepspeed)
        for deepspeed in (fields, {"config": {"zero_optimization": zero}})
    )
    assert by_fields.exit_code == 0, by_fields.output
    assert by_json.output == by_fields.output


@pytest.mark.parametrize(
    ("key", "size", "strategy", "gib"),
    [("reduce_bucket_size", 5e9, "ZeRO 1", 16.8), ("stage3_max_live_parameters", 5e9, "ZeRO 3", 7.5)],
)
def test_sizes_in_a_deepspeed_json_count(key: str, size: float, strategy: str, gib: float, tmp_path: Path) -> None:
    """The defaults are 5e8 elements, in fp32, and 1e9, in bf16."""
    arguments = ("--parameters", "7B", "--accelerator-memory", "80GiB", "--sequence-length", "2048")

    def working(**zero: float) -> float:
        row = rows_of(run(tmp_path, *arguments, **deepspeed(zero_optimization=zero)).output)[strategy]
        return float(row.removeprefix(strategy).split()[4])

    assert working(**{key: size}) - working() == pytest.approx(gib, abs=0.11)


def test_parameters_that_fsdp_keeps_gathered_count(tmp_path: Path) -> None:
    arguments = ("--parameters", "7B", "--accelerator-memory", "80GiB", "--sequence-length", "2048")

    def working(reshard: bool) -> float:
        result = run(tmp_path, *arguments, strategy="fsdp", fsdp={"reshardAfterForward": reshard})
        return float(rows_of(result.output)["fsdp"].split()[5])

    assert working(True) < 4
    assert working(False) > 7e9 * 2 / GIB
