"""The recipe for epochs in the docs."""

from __future__ import annotations

import re
from math import ceil
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "port-plain-torch.md"


@pytest.mark.parametrize("epochs", [1, 2, 3, 10, 90])
@pytest.mark.parametrize("num_samples", [1, 63, 64, 65, 1000, 50_000])
@pytest.mark.parametrize("global_batch", [1, 32, 48, 64, 100, 256])
def test_each_epoch_has_an_end_and_the_last_one_is_the_last_step(
    epochs: int, num_samples: int, global_batch: int
) -> None:
    [row] = [line for line in PAGE.read_text().splitlines() if line.startswith("| epochs |")]
    recipe = dict(re.findall(r"`(total|ends) = ([^`]+)`", row))
    known = {"ceil": ceil, "epochs": epochs, "dataset": range(num_samples), "global_batch": global_batch}
    total, ends = eval(recipe["total"], known), eval(recipe["ends"], known)
    assert max(ends) == total
    for epoch in range(1, epochs + 1):
        assert any((end - 1) * global_batch < epoch * num_samples <= end * global_batch for end in ends)
