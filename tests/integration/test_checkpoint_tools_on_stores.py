"""`spottrain checkpoints` on each store, with a Hugging Face model.

The exported model is as from_pretrained wants it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from object_stores import JobStore
from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.recovery.training_state import model_config
from spottrain_cli.main import main

STEPS = (10, 20)


def run(job_store: JobStore, command: str, *arguments: str, uri: str | None = None) -> Result:
    endpoint = ["--endpoint-url", job_store.endpoint_url] if job_store.endpoint_url else []
    return CliRunner().invoke(main, ["checkpoints", command, uri or job_store.uri, *arguments, *endpoint])


def test_the_tools_on_each_store(job_store: JobStore, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    storage = job_store.open()
    saver = Checkpointer(storage, generation=1, attempt_id="a", rank=0, world_size=1)
    for step in STEPS:
        with torch.no_grad():
            model.transformer.wte.weight += 0.5
        extra = {"model_config": model_config(model)}
        saver.save({"model": model.state_dict()}, step=step, extra=extra)

    assert [line.split()[0] for line in run(job_store, "ls").output.splitlines()[1:]] == ["20", "10"]
    assert "Step 10 of generation 1" in run(job_store, "show", "--step", "10").output
    assert run(job_store, "verify").output == "step 20: whole\nstep 10: whole\n"

    whole = run(job_store, "export", str(tmp_path / "model.safetensors"))
    assert whole.exit_code == 0, whole.output
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in model.state_dict().items())

    assert run(job_store, "export", str(tmp_path / "folder")).exit_code == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    tokens = torch.arange(8).unsqueeze(0)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)

    (data,) = [key for key, _ in storage.list("attempts/g000001-s000000020") if key.endswith(".data")]
    content = storage.get(data)[0]
    storage.upload(data, content[: len(content) // 2])
    verified = run(job_store, "verify")
    assert verified.exit_code == 1
    assert f"step 20: damaged. {data} of the checkpoint is cut short" in verified.output
    assert "step 10: whole" in verified.output
    damaged = run(job_store, "export", str(tmp_path / "damaged.safetensors"))
    assert "is cut short" in damaged.output
    assert not (tmp_path / "damaged.safetensors").exists()


def test_mistakes_on_each_store_get_sentences(job_store: JobStore, tmp_path: Path) -> None:
    missing_uri = f"{job_store.kind}://no-such-bucket/job"
    sentence = "does not exist: create it"
    if job_store.is_folder:
        missing_uri, sentence = f"file://{tmp_path}/nowhere", "There is no folder"
    job_store.open()
    for command in ("ls", "show", "verify", "export"):
        more = [str(tmp_path / "out.safetensors")] if command == "export" else []
        empty = run(job_store, command, *more)
        assert f"There is no commit at {job_store.uri}. Is it the job's checkpoint.uri?" in empty.output
        missing = run(job_store, command, *more, uri=missing_uri)
        assert sentence in missing.output
        assert (empty.exit_code, missing.exit_code) == (1, 1)
        assert "Traceback" not in empty.output + missing.output


@pytest.mark.parametrize("uri", ["s3:/bucket/job", "http://bucket/job", "bucket/job", "gs://", "file://host/folder"])
def test_a_uri_that_names_no_store_gets_a_sentence(uri: str) -> None:
    result = CliRunner().invoke(main, ["checkpoints", "ls", uri])
    assert result.exit_code == 1
    assert "checkpoint.uri" in result.output
    assert "Traceback" not in result.output
