"""The types that a model in bf16 takes and returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from spottrain.engines.precision import autocast_forward, cast_around, slower_than_needed

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("precision", "device", "capability", "tf32", "said"),
    [
        (torch.float32, "cuda", (8, 0), False, True),
        (torch.float32, "cuda", (9, 0), False, True),
        (torch.float32, "cuda", (8, 0), True, False),
        (torch.float32, "cuda", (7, 5), False, False),
        (torch.bfloat16, "cuda", (8, 0), False, False),
        (torch.float32, "cpu", (8, 0), False, False),
    ],
)
def test_plain_fp32_on_a_gpu_that_has_better_is_said(
    precision: torch.dtype,
    device: str,
    capability: tuple[int, int],
    tf32: bool,
    said: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The script may have chosen TF32 in torch's older way, too."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    sentence = slower_than_needed(precision, torch.device(device))
    torch.set_float32_matmul_precision(before)
    assert (sentence is not None) == said
    assert sentence is None or ("A100" in sentence and "precision: bf16" in sentence)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Record:
    x: Any


class Model(nn.Module):
    """Returns what it computes in a structure of the kind in which it got the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, given: Any) -> Any:
        match given:
            case Record(x):
                return Record(self.layer(x))
            case {"x": x}:
                return type(given)(x=self.layer(x), name="text")
            case Pair(first, second):
                return Pair(self.layer(first), second)
            case [[x]]:
                return [(self.layer(x),)]
            case _:
                return self.layer(given)


INPUT = torch.ones(1, 2)


def output_of_transformers() -> Any:
    from transformers.utils import ModelOutput  # takes a second, in each process that collects tests

    return ModelOutput(x=INPUT)


# How each is made, and where the tensor is in it.
STRUCTURES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "tensor": (lambda: INPUT, lambda found: found),
    "dict": (lambda: {"x": INPUT}, lambda found: found["x"]),
    "dataclass": (lambda: Record(INPUT), lambda found: found.x),
    "list of tuples": (lambda: [(INPUT,)], lambda found: found[0][0]),
    "named tuple": (lambda: Pair(INPUT, 3), lambda found: found.first),
    "output of transformers": (output_of_transformers, lambda found: found.x),
}


@pytest.mark.parametrize("how", ["autocast", "cast"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_model_in_bf16_takes_and_returns_fp32_in_any_structure(structure: str, how: str) -> None:
    model, (make, output) = Model(), STRUCTURES[structure]
    given = make()
    if how == "autocast":
        autocast_forward(model, CPU, torch.bfloat16)
    else:
        cast_around(model.to(torch.bfloat16), torch.bfloat16)
    found = model(given)
    assert type(found) is type(given)
    assert output(found).dtype is torch.float32
    assert torch.equal(output(found), output(found).bfloat16().float()), "it was not computed in bf16"
