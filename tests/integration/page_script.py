"""Runs a script of docs/how-to/port-plain-torch.md as ranks, with small data.

RANK_SETTINGS comes from the test.
"""

import json
import os
from pathlib import Path
from typing import Any

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

torch.set_num_threads(1)
model = nn.Linear(4, 1, bias=False)
nn.init.zeros_(model.weight)
# The output rises from 0 to 1, is nearest to 0.5 at step 200, and then leaves it again.
scope: dict[str, Any] = {
    "model": model,
    "make_optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=(1 - 0.5 ** (1 / 200)) / 8),
    "dataset": [(torch.ones(4), torch.ones(1))] * 8,
    "validation": [(torch.ones(4), torch.full((1,), 0.5))] * 3,
    "loss_fn": functional.mse_loss,
}
exec(RANK_SETTINGS["script"], scope)
found = {"best": vars(scope["best"]), "step": scope["training"].step}
Path(f"{RANK_SETTINGS['result']}-{os.environ['RANK']}").write_text(json.dumps(found))
