"""Micro-batches arrive as a worker has sent them, small ones without shared memory."""

from __future__ import annotations

from collections import namedtuple
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from spottrain.data.batch import BatchPlan
from spottrain.data.batches import Batches
from spottrain.data.hand_over import Packed, packed, unpacked
from spottrain.data.loader import Data, load_batches
from spottrain.data.order import Permutation

Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6).reshape(2, 3),
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.ones(2, dtype=torch.bool),
        torch.ones(2, dtype=torch.complex64),
        {"x": Pair(torch.ones(2), "a"), "y": [np.arange(3), None, b"b"]},
    ],
    ids=["matrix", "scalar", "empty", "bool", "complex", "structure"],
)
def test_small_values_are_packed_and_stay_the_same(value: Any) -> None:
    sent = packed(value)
    assert isinstance(sent, Packed)
    found = unpacked(sent)
    assert repr(found) == repr(value)
    if isinstance(value, torch.Tensor):
        assert (found.dtype, found.shape, found.stride()) == (value.dtype, value.shape, value.stride())
        found.zero_()  # it can be written


def test_a_tensor_in_two_places_stays_one() -> None:
    one = torch.ones(2)
    first, second = unpacked(packed([one, one]))
    first.zero_()
    assert second.tolist() == [0, 0]


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(1 << 16),
        torch.ones(2, 3).T,
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2).to_sparse(),
        torch.ones(2).untyped_storage(),
        (lambda row: [row, row[1:]])(torch.ones(3)),
        lambda: None,
    ],
    ids=["large", "strides", "gradient", "subclass", "bfloat16", "sparse", "storage", "views", "unpicklable"],
)
def test_what_torch_has_to_pass_is_left_to_it(value: Any) -> None:
    assert packed(value) is value


@pytest.mark.parametrize(("length", "is_shared"), [(100, False), (100_000, True)])
def test_small_micro_batches_come_without_shared_memory(length: int, is_shared: bool) -> None:
    plan = BatchPlan(global_batch=2, micro_batch=2, world_size=1)
    batches = load_batches(
        Data([torch.full((length,), number) for number in range(4)], num_workers=1),
        Batches(Permutation(num_samples=4, shuffle=False), plan.global_batch),
        plan,
        rank=0,
        first_step=1,
        device=torch.device("cpu"),
    )
    with closing(batches):
        found = next(batches).data
    assert found.is_shared() == is_shared
    assert found[:, 0].tolist() == [2, 3]
