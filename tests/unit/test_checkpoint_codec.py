"""State goes to JSON and back as what it was, and nothing else gets through."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from spottrain.checkpoint.errors import CorruptCheckpoint, UnsupportedState
from spottrain.checkpoint.format import codec

keys = st.text(max_size=8) | st.sampled_from(["$tensor", "$items", "$", "a.b", ""])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
hashable = keys | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), keys)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
    ),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, and of the same types.

    1, True and 1.0 are different, and so are -0.0 and 0.0. NaN equals NaN.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=False)
        return len(one) == len(other) and all(same(a, b) for pair in pairs for a, b in zip(*pair, strict=True))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (one, math.copysign(1, one)) == (
            other,
            math.copysign(1, other),
        )
    return bool(one == other)


@given(trees)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    text = json.dumps(codec.encode(value), allow_nan=False)
    assert same(codec.decode(json.loads(text)), value)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6).reshape(2, 3),
        np.array([1.5, np.nan], np.float32),
        np.zeros((0, 2), bool),
        np.asfortranarray(np.eye(3)),
    ],
)
def test_an_array_of_numpy_comes_back(value: Any) -> None:
    found = codec.decode(json.loads(json.dumps(codec.encode({"a": [value]}))))["a"][0]
    assert found.dtype == value.dtype
    assert np.array_equal(found, value, equal_nan=value.dtype.kind == "f")
    found[...] = 0  # it can be written


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64("nan"), np.int64(3), np.bool_(True), np.str_("x")])
def test_a_scalar_of_numpy_comes_back_as_pythons(value: Any) -> None:
    found = codec.decode(codec.encode([value]))
    assert same(found, [value.item()])
    assert type(found[0]) is type(value.item())


def test_tensors_are_named_by_their_path_and_put_back() -> None:
    weight, moment = torch.ones(2), torch.zeros(3)
    state = {"model": {"layer.weight": weight}, "optim": {"state": {0: {"m": moment}}, "lr": (0.1, [moment.sum()])}}
    tensors, tree = codec.split(state)
    assert set(tensors) == {"model.layer.weight", "optim.state.0.m", "optim.lr.1.0"}
    back = codec.join(json.loads(json.dumps(tree)), tensors)
    assert back["model"]["layer.weight"] is weight
    assert back["optim"]["state"][0]["m"] is moment
    assert back["optim"]["lr"] == (0.1, [torch.tensor(0.0)])


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(UnsupportedState, match=r"the name 'a\.b'"):
        codec.split({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(math.inf),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.zeros(0, 4, dtype=torch.int64),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor([True, False]),
        torch.arange(4.0).reshape(1, 4)[:, 2],  # of one element, which torch calls contiguous with any stride
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
    ],
)
def test_a_small_tensor_among_plain_values_comes_back(tensor: torch.Tensor) -> None:
    text = json.dumps(codec.encode({"best": (1, tensor)}), allow_nan=False)
    back = codec.decode(json.loads(text))["best"][1]
    assert back.dtype is tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_tensors_among_plain_values_are_small_together() -> None:
    half = torch.zeros(codec.MAX_INLINE_BYTES // 8)
    codec.encode({"a": half, "b": half})
    with pytest.raises(UnsupportedState, match=r"at 'c' is one too many: .* 1 MiB in total"):
        codec.encode({"a": half, "b": half, "c": torch.ones(1)})


@pytest.mark.parametrize(
    ("wrap", "levels"),
    [
        (lambda inner: [inner], 1),
        (lambda inner: (inner,), 2),
        (lambda inner: {"k": inner}, 1),
        (lambda inner: {1: inner}, 3),
    ],
    ids=["list", "tuple", "names", "numbers"],
)
def test_what_is_nested_too_deep_to_be_read_again_is_refused_by_its_key(
    wrap: Callable[[Any], Any], levels: int
) -> None:
    value: Any = torch.ones(1)
    for _ in range((codec.MAX_LEVELS - 1) // levels):
        value = wrap(value)
    committed = json.dumps({"rank_states": [codec.encode({"deep": value})]})  # the deepest place of a manifest
    assert codec.decode(from_json(committed)["rank_states"][0]).keys() == {"deep"}
    with pytest.raises(UnsupportedState, match=r"at 'deep(\.[0k1]){4}' is nested too deep"):
        codec.encode({"deep": wrap(value)})


@pytest.mark.parametrize("files", [["x", "\udcff"], {"1": "\udcff"}, {"1": np.str_("\udcff")}, {1: {"\udcff": 0}}])
def test_a_string_that_utf_8_cannot_hold_is_refused_by_its_key(files: Any) -> None:
    with pytest.raises(UnsupportedState, match=r"at 'files\.1(\.\\udcff)?' is a string that .*: surrogates not"):
        codec.encode({"files": files})


class Marked(torch.Tensor):
    """A tensor that is more than its values."""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        torch.ones(2).as_subclass(Marked),
        torch.zeros(2, dtype=torch.int8).view(torch.bits8),
    ],
    ids=["meta", "sparse", "nested", "subclass", "bits"],
)
def test_a_tensor_that_is_more_than_its_bytes_is_refused_by_its_key(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedState, match=r"at 'best\.x' is a .*Marked|Tensor \(.* without pickle"):
        codec.encode({"best": {"x": tensor}})


@pytest.mark.parametrize("kind", ["Tensor", "load", "no_such_type", "qint8", "__loader__"])
def test_a_small_tensor_of_another_kind_is_damage(kind: str) -> None:
    with pytest.raises(CorruptCheckpoint, match="is not a dtype that tensors can have"):
        codec.decode({"$small_tensor": [kind, [1], "AAAAAA=="]})


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize("value", [object(), {1, 2}, Colour.RED, len, 1j, torch.device("cpu"), torch.float32])
def test_what_needs_pickle_is_refused_by_its_key(value: Any) -> None:
    with pytest.raises(UnsupportedState, match=r"at 'optim\.groups\.1\.x' is a .* without pickle"):
        codec.split({"optim": {"groups": [{}, {"x": value}]}})


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": "gone"},
        {"$float": "x"},
        {"$bytes": "%"},
        {"$tuple": 3},
        {"$items": [1]},
        {"$pickle": "gASV"},
        {"$": 0},
        {"$small_tensor": ["float32", [-1], "AAAAAA=="]},
        {"$small_tensor": ["float32", [1 << 64], "AAAAAA=="]},
        {"$small_tensor": ["float32", [2], "AAAAAA=="]},
    ],
)
def test_a_tag_that_makes_no_sense_is_corruption(tree: Any) -> None:
    with pytest.raises(CorruptCheckpoint):
        codec.decode(tree)
