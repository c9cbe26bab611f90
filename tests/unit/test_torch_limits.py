"""Errors of torch that are known limits name them, and what to do."""

from __future__ import annotations

import pytest

from spottrain.world.failures import failure_of


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (
            "setStorage: sizes [4, 4], strides [1, 4], storage offset 0, and itemsize 4 requiring a storage size of "
            "64 are out of bounds for storage of size 0",
            "no second-order gradients",
        ),
        ("mm: mat2 must be a matrix, got 1-D tensor", "deepspeed at stage 3"),
        ("Inplace update to inference tensor outside InferenceMode is not allowed.", "torch.no_grad"),
        ("view(): cannot view shape (2, j1, 4) as [-1, 4]", "nested tensors"),
        (
            "aten.add_.Tensor: in-place operations that require placement changes are not supported. The input has "
            "placement (Shard(dim=0),)",
            "fewer rows than there are ranks",
        ),
        (
            "Operator aten._fused_sgd_.default does not have a sharding strategy registered.",
            "Make it without fused=True",
        ),
    ],
)
def test_the_error_of_a_limit_says_what_to_do(error: str, advice: str) -> None:
    failure = failure_of(RuntimeError(error), rank=1)
    assert failure is not None
    assert error.rstrip(".") in failure.message
    assert advice in failure.message


def test_another_error_stays_as_it_is() -> None:
    failure = failure_of(RuntimeError("the shapes differ"), rank=1)
    assert failure is not None
    assert failure.message == "RuntimeError: the shapes differ"
