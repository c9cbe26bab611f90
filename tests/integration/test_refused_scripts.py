"""What a session can't train is refused with a sentence.

The sentence is the same on all ranks, under every strategy and from every framework. Real ranks on gloo run the
scripts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forked_ranks import forked_ranks, rank_environments

SCRIPT = Path(__file__).with_name("refused_script.py")
# One world of ranks tries them in turn.
STRATEGIES = ("auto", "ddp", "fsdp", "deepspeed 0", "deepspeed 1", "deepspeed 2", "deepspeed 3")
PREPARED = {
    "iterable": "dataset (Stream) can't be read by index",
    "data loader": "dataset is a DataLoader",
    "splits": "dataset is a mapping (dict)",
    "empty": "the dataset has no samples",
    "sampler": "loader: batch_sampler can't be given: pass what it returns as order",
    "collate": "collate (list) is not a function",
    "no workers": "prefetch_factor option could only be specified in multiprocessing",
    "meta": "0.weight is on the meta device",
    "zero init": "the parameter 0.weight was made under deepspeed.zero.Init",
    "tensor parallel": "the parameter 0.weight is a DTensor",
    "wrapped": "the model is wrapped already (DistributedDataParallel)",
    "frozen": "the model has no parameter that is trained",
    "sparse": "the module 0 is an Embedding with sparse=True",
    "sparse bag": "the module 0 is an EmbeddingBag with sparse=True",
    "closure": "the optimizer LBFGS computes the loss again in its step",
    "loss": "2 of the optimizer's parameters are not the model's",
    "optimizer made": "optimizer (AdamW) is not a function",
    "optimizers": "optimizer makes a list",
    "plateau": "the schedule ReduceLROnPlateau follows a metric",
    "schedulers": "scheduler makes a list",
    "scheduler made": "scheduler (StepLR) is not a function",
}
ADOPTED = {
    **{name: PREPARED[name] for name in ("iterable", "data loader", "splits", "empty", "closure", "loss", "plateau")},
    "meta": "0.weight is on the meta device",
    "tensor parallel": "the parameter 0.weight is spread over another dimension than data",
    "tensor and data parallel": "the parameter 0.weight is spread over another dimension than data",
    "version 1": "the framework has spread the model by FSDP version 1",
    "not spread": "the framework has not spread the model over the 2 ranks",
    "sparse": "the module module.0 is an Embedding with sparse=True",
}
SECOND = "the session was given a second model"


@pytest.fixture(scope="module")
def ranks(fork: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank was told, under each strategy."""
    result = tmp_path_factory.mktemp("refused") / "result"
    settings = [
        {"environment": environment, "strategies": STRATEGIES, "result": str(result)}
        for environment in rank_environments(2)
    ]
    with forked_ranks(fork, SCRIPT, settings):
        pass
    return [json.loads(Path(f"{result}-{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", PREPARED)
def test_what_cannot_be_trained_is_refused_with_a_sentence(
    name: str, strategy: str, ranks: list[dict[str, str]]
) -> None:
    said = [rank[f"{name}, {strategy}"] for rank in ranks]
    assert said[0].startswith(PREPARED[name]), said[0]
    assert said[0] == said[1]


@pytest.mark.parametrize("name", ADOPTED)
def test_so_is_what_a_framework_has_made(name: str, ranks: list[dict[str, str]]) -> None:
    said = [rank[f"{name}, adopted"] for rank in ranks]
    assert said[0].startswith(ADOPTED[name]), said[0]
    assert said[0] == said[1]


def test_all_ranks_train_the_same_steps(ranks: list[dict[str, str]]) -> None:
    for rank in ranks:
        assert rank["other totals"].startswith("The total of steps is 4 on one rank and 5 on another. Pass")


def test_all_ranks_have_the_whole_data_set(ranks: list[dict[str, str]]) -> None:
    for rank in ranks:
        assert rank["other lengths"].startswith("The data set has 7 samples on one rank and 8 on another. Give every")


def test_a_session_trains_one_model_and_what_was_refused_counts_for_none(ranks: list[dict[str, str]]) -> None:
    for rank in ranks:
        assert rank["after all"] == "accepted"
        assert rank["a second"].startswith(SECOND), rank["a second"]
        assert rank["a second, adopted"].startswith(SECOND)
