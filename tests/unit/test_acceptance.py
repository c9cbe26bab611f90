"""What a session refuses before it spreads a model names the cause and what to do."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from spottrain.data import Streams
from spottrain.loop.acceptance import check_dataset, check_model, check_scheduler, checked_total
from spottrain.world.failures import UserError


@pytest.mark.parametrize("models", [[nn.Linear(1, 1)], {"generator": nn.Linear(1, 1)}, (nn.Linear(1, 1),)])
def test_several_models_are_to_be_put_into_one(models: Any) -> None:
    with pytest.raises(UserError, match=f"the model is a {type(models).__name__}.*nn.ModuleDict"):
        check_model(models)


class OfEpochs:
    """As the schedules of timm."""

    def step(self, epoch: int, metric: float | None = None) -> None: ...


class OfMetric:
    def step(self, metrics: float) -> None: ...


@pytest.mark.parametrize(
    ("schedule", "sentence"), [(OfEpochs(), "needs the epoch in each step"), (OfMetric(), "follows a metric")]
)
def test_a_schedule_that_needs_more_than_the_step_is_refused_for_what_it_needs(schedule: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_scheduler(schedule)


def test_a_total_that_is_no_whole_number_names_the_loop_by_epochs() -> None:
    with pytest.raises(UserError, match=r"those of training\.epochs"):
        checked_total(2.5)


def test_an_iterable_is_refused_with_the_way_to_read_it() -> None:
    with pytest.raises(UserError, match=r"dataset \(list_iterator\) .* spottrain.data.Streams\(make_stream"):
        check_dataset(iter([1]))
    check_dataset(Streams(lambda stream, number: [stream], streams=1))
