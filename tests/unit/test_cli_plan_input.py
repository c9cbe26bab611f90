"""`spottrain plan` with input that makes no sense."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from plan_command import deepspeed, in_one_line, run
from spottrain_api.settings.training import Batch, DeepSpeedConfig
from spottrain_api.v1alpha1.capacity import Nodes, OnDemandCapacity
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_cli.main import main
from spottrain_cli.plan import read_job

SPOT_POOL = {"name": "spot", "provider": "eks", "capacityType": "spot"}


@pytest.mark.parametrize(
    ("arguments", "spec", "sentence"),
    [
        ((), {}, "The size of the model is missing. Give --parameters, such as 7B, or --config"),
        (("--parameters", "many"), {}, "'many' is not a size. Write it like 7B, 350M or 124439808."),
        (("--parameters", "0"), {}, "'0' is not a size"),
        (("--parameters", "0.4"), {}, "'0.4' is less than one parameter. Give the unit, as in 7B."),
        (("--parameters", "1e400"), {}, "'1e400' is not a size"),
        (("--parameters", "1e300T"), {}, "'1e300T' is not a size"),
        (("--parameters", "7B", "--host-memory", "80"), {}, "'80' is less than a MiB. Give the unit, as in 80GiB"),
        (("--config", "nowhere.json"), {}, "nowhere.json cannot be read as JSON"),
        (("--parameters", "7B"), {"batch": {"global": 64, "micro": 0}}, "spec.batch.micro: Input should be greater"),
        (("--parameters", "7B"), {"nodes": {"min": 4, "max": 2}}, "nodes.min is larger than nodes.max"),
        (("--parameters", "7B"), {"strtegy": "auto"}, "spec.strtegy: There is no such field"),
        (("--parameters", "7B"), deepspeed(zero_optimization=3), "has zero_optimization 3, which is not an object"),
        (("--parameters", "7B"), deepspeed(zero_optimization={"stage": 5}), "deepspeed.zeroStage is 5; use 0, 1, 2"),
        (
            ("--parameters", "7B"),
            deepspeed(zero_optimization={"reduce_bucket_size": "5e8"}),
            'has reduce_bucket_size "5e8"; write a number of elements',
        ),
        (
            ("--parameters", "7B"),
            deepspeed(zero_optimization={"offload_param": {"device": "cpu"}}),
            "offload_param to the CPU needs ZeRO stage 3 or higher, not 2; raise zeroStage.",
        ),
        (
            ("--parameters", "7B"),
            deepspeed(zero_optimization={"offload_param": True}),
            "has offload_param true, which",
        ),
    ],
)
def test_bad_input_is_answered_by_a_sentence(
    arguments: tuple[str, ...], spec: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    result = run(tmp_path, *arguments, "--accelerator-memory", "80GiB", **spec)
    assert result.exit_code == 1
    assert sentence in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "spec",
    [
        {"nodes": {"min": 4, "max": 2}},
        {"nodes": {"min": 1, "max": 513}, "batch": {"global": 4096}},
        {"capacity": {"onDemand": {"min": 3, "max": 2}}},
        {"capacity": {"onDemand": {"min": 9}}},
        {"capacity": {"onDemand": {"max": 1}, "spot": {"max": 0}}},
        {"nodes": {"min": 4, "max": 8}, "capacity": {"spot": {"max": 2}, "pools": [SPOT_POOL]}},
        {"batch": {"global": 64, "micro": 65}},
        {"batch": {"global": 31}},
        {"batch": {"global": 128, "micro": 8, "multipleOf": 3}},
        {"batch": {"global": 128, "micro": 2, "multipleOf": 4}},
        {"batch": {"global": 64, "micro": 8, "multipleOf": 4}},
        {"precision": "fp16"},
        {"strategy": "ddp", "fsdp": {"offload": True}},
        {"strategy": "fsdp", "deepspeed": {"config": {"prescale_gradients": True}}},
        {"fsdp": {"sharding": "hybrid"}, "processesPerNode": 1},
        {"deepspeed": {"zeroStage": 0, "offloadOptimizer": True}},
        {"deepspeed": {"offloadParameters": True}},
    ],
    ids=str,
)
def test_what_the_api_server_refuses_has_no_plan(spec: dict[str, Any], tmp_path: Path) -> None:
    """The sentence is that of the CRD."""
    result = run(tmp_path, "--parameters", "7B", "--accelerator-memory", "80GiB", **spec)
    assert result.exit_code == 1
    said = in_one_line(result.output).partition(" is invalid. ")[2].removesuffix(".")
    models = (Nodes, OnDemandCapacity, Batch, DeepSpeedConfig, TrainingJobSpec)
    assert said in {message for model in models for _, message in model.cel_rules}


@pytest.mark.parametrize("metadata", [None, ["llm"], {"name": None}])
def test_a_job_without_a_name_is_the_job(metadata: object, tmp_path: Path) -> None:
    run(tmp_path, "--accelerator-memory", "80GiB")
    [_, job] = yaml.safe_load_all((tmp_path / "job.yaml").read_text())
    file = io.StringIO(yaml.safe_dump({**job, "metadata": metadata}))
    assert read_job(file)[0] == "the job"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "is not YAML"),
        (b"\xc3\x28", "is not YAML"),
        ("kind: Pod", "has 0 TrainingJobs. Give a file with exactly one."),
    ],
)
def test_a_file_without_a_job_is_refused(text: str | bytes, sentence: str) -> None:
    arguments = ["plan", "-", "--parameters", "7B", "--accelerator-memory", "80GiB"]
    result = CliRunner().invoke(main, arguments, input=text)
    assert result.exit_code == 1
    assert sentence in result.output
