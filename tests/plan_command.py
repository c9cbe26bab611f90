"""`spottrain plan` on a job and a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result

from model_configs import LLAMA2_7B
from spottrain_cli.main import main


def run(folder: Path, *arguments: str, columns: int = 80, **spec: Any) -> Result:
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
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(main, ["plan", str(folder / "job.yaml"), *arguments])


def deepspeed(**config: Any) -> dict[str, Any]:
    """The fields of a job with a DeepSpeed JSON."""
    return {"strategy": "deepspeed", "deepspeed": {"config": config}}


def in_one_line(output: str) -> str:
    return " ".join(output.split())
