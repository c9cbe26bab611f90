"""Public scripts, ported, train after a drain or a loss as undisturbed ones do, on any number of ranks.

The scripts are in examples/ports, and docs/ports.md has what they need. Real ranks on gloo.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from forked_ranks import forked_ranks, rank_environments

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).with_name("port_script.py")
# By script, and the strategy if it has several, the settings of its job.
PORTS: dict[str, dict[str, Any]] = {
    "diffusers_text_to_image": {"global_batch": 10, "micro_batch": 10},
    "diffusers_dreambooth": {"global_batch": 5},
    "trl_dpo": {"global_batch": 7},
    "trl_dpo, fsdp": {"global_batch": 7, "strategy": "fsdp"},
    "trl_grpo": {"global_batch": 5},
    "nanochat_optimizer": {"global_batch": 7},
    "torchtune_full_finetune": {"global_batch": 6},
    "axolotl_multipack": {"global_batch": 12},
    "axolotl_multipack, fsdp": {"global_batch": 12, "strategy": "fsdp"},
    "deepspeed_cifar": {"global_batch": 5, "micro_batch": 2, "strategy": "deepspeed"},
    "deepspeed_chat_sft": {"global_batch": 5, "micro_batch": 2, "strategy": "deepspeed"},
    "lightning_gan": {"global_batch": 5},
    "lightning_imagenet": {"global_batch": 5, "micro_batch": 2},
    "llama_factory_trainer": {"global_batch": 5, "micro_batch": 2},
    "nanogpt_train": {"global_batch": 7},
    "pytorch_imagenet": {"global_batch": 7},
    "time_sequence_prediction": {"global_batch": 7},
}
# Others draw random numbers or an order that their plain form draws otherwise.
COMPARABLE = (
    "trl_dpo",
    "nanochat_optimizer",
    "torchtune_full_finetune",
    "axolotl_multipack",
    "deepspeed_chat_sft",
    "llama_factory_trainer",
    "lightning_gan",
    "lightning_imagenet",
    "time_sequence_prediction",
)
WORLDS = {"plain": 1, "alone": 1, "two": 2, "three": 3}
DRAINED, LOST = {"event": "notice", "after": 3}, {"event": "loss", "after": 5}


def runs_of(name: str, folder: Path, world: str) -> list[dict[str, Any]]:
    """What one script does in a world: runs of a folder are generations of one job."""

    def of(job: str, **how: Any) -> dict[str, Any]:
        script = name.partition(",")[0]
        return {"name": script, "folder": str(folder / name / job), "form": "ported", **PORTS[name], **how}

    match world:
        case "plain":
            return [of("plain", form="plain")] if name in COMPARABLE else []
        case "alone":
            return [of("alone")]
        case "two":
            return [
                of("moved", **DRAINED),
                of("undisturbed"),
                *(of("drained", **DRAINED), of("drained")),
                *(of("lost", **LOST), of("lost")),
            ]
        case _:
            return [of("moved")]


def train(fork: Any, folder: Path, jobs: tuple[str, ...]) -> Path:
    """The folder of what was trained."""
    for world, world_size in WORLDS.items():
        every = [each for name in PORTS for each in runs_of(name, folder, world)]
        runs = [each for each in every if Path(each["folder"]).name in jobs]
        settings = {"runs": runs, "result": str(folder / "result")}
        ranks = [{"environment": environment, **settings} for environment in rank_environments(world_size)]
        with forked_ranks(fork, SCRIPT, ranks if runs else [], seconds=300):
            pass
        for rank in range(world_size if runs else 0):
            assert json.loads((folder / f"result-{rank}").read_text()) == {}
    return folder


@pytest.fixture(scope="module")
def moved(fork: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(fork, tmp_path_factory.mktemp("moved"), ("alone", "moved"))


@pytest.fixture(scope="module")
def trained(fork: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(fork, tmp_path_factory.mktemp("ports"), ("plain", "alone", "undisturbed", "drained", "lost"))


def tensors(folder: Path, name: str, job: str) -> dict[str, torch.Tensor]:
    found = torch.load(folder / name / job / "trained.pt", weights_only=True)
    return {f"{part}.{key}": value for part, state in found.items() for key, value in state.items()}


def check_close(folder: Path, name: str, job: str, wanted: str) -> None:
    found, expected = tensors(folder, name, job), tensors(folder, name, wanted)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=partial("{}: {}".format, key))


@pytest.mark.parametrize("name", PORTS)
def test_a_script_that_resumes_on_another_number_of_ranks_trains_the_same(name: str, moved: Path) -> None:
    check_close(moved, name, "moved", "alone")


@pytest.mark.nightly
@pytest.mark.parametrize("job", ["drained", "lost"])
@pytest.mark.parametrize("name", PORTS)
def test_a_script_that_resumes_on_as_many_ranks_trains_the_same_to_the_bit(
    name: str, job: str, trained: Path
) -> None:
    found, wanted = tensors(trained, name, job), tensors(trained, name, "undisturbed")
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "job", "wanted"),
    [*((name, "undisturbed", "alone") for name in PORTS), *((name, "alone", "plain") for name in COMPARABLE)],
)
def test_a_script_trains_what_its_plain_form_trains(name: str, job: str, wanted: str, trained: Path) -> None:
    check_close(trained, name, job, wanted)
