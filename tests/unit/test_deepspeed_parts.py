"""Stretches of flattened tensors as boxes.

They also go through a checkpoint to a different number of stretches.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spottrain.checkpoint.format.dcp import plan_save, written_tensors
from spottrain.engines.deepspeed_parts import FlatPart, boxes

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_cover_a_stretch_once_and_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    elements = torch.arange(size).view(shape)
    found = list(boxes(shape, begin, end))
    covered: list[int] = []
    for box in found:
        inside = elements[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))]
        assert inside.flatten().tolist() == list(range(box.begin, box.end))
        covered += inside.flatten().tolist()
    assert covered == list(range(begin, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(SHAPES, st.data())
def test_the_parts_of_all_ranks_are_the_tensor(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.randn(shape)
    cuts = data.draw(st.lists(st.integers(0, whole.numel()), max_size=4))
    rebuilt = torch.zeros_like(whole)
    for begin, end in pairwise([0, *sorted(cuts), whole.numel()]):
        part = FlatPart(whole.flatten()[begin:end], shape=whole.shape, begin=begin)
        plan = plan_save({"weight": part}, rank=0, group=None)
        written = written_tensors(plan, {"weight": part})
        for entry, source in zip(plan.entries, written, strict=True):
            assert entry.shape == tuple(whole.shape)
            place = tuple(slice(o, o + n) for o, n in zip(entry.chunk.offsets, entry.chunk.lengths, strict=True))
            rebuilt[place] += source
    assert torch.equal(rebuilt, whole)


def test_nothing_can_be_computed_with_a_part() -> None:
    part = FlatPart(torch.ones(3), shape=torch.Size([2, 4]), begin=2)
    assert (part.shape, part.dtype) == ((2, 4), torch.float32)
    assert repr(part) == "FlatPart([2, 5) of (2, 4), torch.float32)"
    with pytest.raises(NotImplementedError, match="this rank has only a part of it"):
        part + 1
