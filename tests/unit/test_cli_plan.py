"""`spottrain plan`: what a person sees before a job runs, also where what they say makes no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from spottrain_cli.job_view import UserError
from spottrain_cli.main import main
from spottrain_cli.model_facts import count, of_config, size

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
LLAMA2_7B = {
    **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"vocab_size": 32000, "intermediate_size": 11008, "hidden_act": "silu", "tie_word_embeddings": False},
}
MISTRAL_7B = {**LLAMA2_7B, "model_type": "mistral", "num_key_value_heads": 8, "intermediate_size": 14336}


def run(folder: Path, *arguments: str, **spec: Any) -> Result:
    job = {
        "kind": "TrainingJob",
        "metadata": {"name": "llm"},
        "spec": {
            "image": "trainer",
            "entrypoint": {"script": "train.py"},
            "nodes": {"min": 2, "max": 8},
            "processesPerNode": 4,
            "precision": "bf16",
            "batch": {"global": 64, "micro": 1},
            "checkpoint": {"uri": "s3://bucket/run"},
            **spec,
        },
    }
    (folder / "job.yaml").write_text(yaml.safe_dump_all([{"kind": "ConfigMap"}, job]))
    (folder / "config.json").write_text(json.dumps(LLAMA2_7B))
    return CliRunner(env={"COLUMNS": "160"}).invoke(main, ["plan", str(folder / "job.yaml"), *arguments])


def test_each_strategy_is_estimated_and_the_choice_explained(tmp_path: Path) -> None:
    config = str(tmp_path / "config.json")
    result = run(tmp_path, "--config", config, "--sequence-length", "2048", "--accelerator-memory", "80GiB")
    assert result.exit_code == 0, result.output
    assert "llm: 6,738,411,520 parameters (32 layers of 4096), bf16, 1 samples at once" in result.output
    assert "8 to 32 ranks" in result.output
    rows = {line.split("  ")[0].strip(): line for line in result.output.splitlines() if " GiB" in line}
    assert "✗" in rows["ddp"]
    assert rows["fsdp"].rstrip().endswith("← auto")
    assert rows["fsdp"].count("✓") == 2
    assert "auto: 6.74 billion parameters on 8 ranks need about" in result.output


def test_what_is_unknown_is_said(tmp_path: Path) -> None:
    result = run(tmp_path, "--parameters", "350M", "--accelerator-memory", "24Gi", strategy="fsdp")
    assert result.exit_code == 0, result.output
    assert "Give --sequence-length to have activations estimated." in result.output
    assert "The job names the strategy fsdp, which is used whatever fits." in result.output


def test_the_host_bounds_what_is_kept_on_the_cpu(tmp_path: Path) -> None:
    arguments = ("--parameters", "70B", "--accelerator-memory", "40GiB", "--sequence-length", "512")
    roomy = run(tmp_path, *arguments, "--host-memory", "2000GiB")
    assert "on the CPU, of 36.8 GiB" in roomy.output
    assert "Nothing fits" in run(tmp_path, *arguments, "--host-memory", "100GiB").output


@pytest.mark.parametrize(
    ("arguments", "spec", "sentence"),
    [
        ((), {}, "Say how large the model is: --parameters 7B, or --config"),
        (("--parameters", "many"), {}, "'many' is not a size; write it like 7B, 350M or 124439808."),
        (("--parameters", "0"), {}, "'0' is not a size"),
        (("--parameters", "7B", "--host-memory", "80"), {}, "'80' is less than a MiB; give the unit as well"),
        (("--config", "nowhere.json"), {}, "nowhere.json can't be read as JSON"),
        (("--parameters", "7B"), {"batch": {"global": 64, "micro": 0}}, "spec.batch.micro: Input should be greater"),
        (("--parameters", "7B"), {"nodes": {"min": 4, "max": 2}}, "nodes.min is larger than nodes.max"),
        (("--parameters", "7B"), {"strtegy": "auto"}, "spec.strtegy: Extra inputs are not permitted"),
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
    ("text", "sentence"), [("a: [", "is not YAML"), ("kind: Pod", "has 0 TrainingJobs; give a file with one.")]
)
def test_a_file_without_a_job_is_refused(text: str, sentence: str) -> None:
    arguments = ["plan", "-", "--parameters", "7B", "--accelerator-memory", "80GiB"]
    result = CliRunner().invoke(main, arguments, input=text)
    assert result.exit_code == 1
    assert sentence in result.output


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        pytest.param(GPT2, 124_439_808, id="GPT-2"),
        pytest.param(LLAMA2_7B, 6_738_415_616, id="Llama 2 7B"),
        pytest.param(MISTRAL_7B, 7_241_732_096, id="Mistral 7B"),
    ],
)
def test_parameters_are_counted_as_published(config: dict[str, Any], parameters: int) -> None:
    facts = of_config(config, "config.json")
    assert facts.num_parameters == pytest.approx(parameters, rel=0.001)
    assert facts.vocabulary == config["vocab_size"]


def test_a_config_that_says_too_little_is_refused() -> None:
    with pytest.raises(UserError, match=r"an encoder and a decoder, .*; give --parameters"):
        of_config({"d_model": 512, "is_encoder_decoder": True}, "config.json")
    with pytest.raises(UserError, match=r"config.json says no num_hidden_layers; instead of it give --parameters"):
        of_config({"hidden_size": 8}, "config.json")


@pytest.mark.parametrize(
    ("text", "value"), [("7B", 7e9), ("1.3e9", 1.3e9), ("350m", 350e6), ("124439808", 124439808), ("2T", 2e12)]
)
def test_counts_are_read(text: str, value: float) -> None:
    assert count(text) == value


@pytest.mark.parametrize(("text", "value"), [("80GiB", 80 << 30), ("24Gi", 24 << 30), ("16 GB", 16 * 10**9)])
def test_sizes_are_read(text: str, value: int) -> None:
    assert size(text) == value
