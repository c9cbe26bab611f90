"""Settings that a job may have if a different library owns the training loop."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from spottrain.engines.adopted import check_spread, refuse_unapplied
from spottrain_api.contract.configuration import TrainerConfig
from spottrain_api.settings.choices import Sharding
from spottrain_api.settings.training import Batch, DeepSpeedConfig, FsdpConfig

INSTEAD = {"precision": "theirs", "fsdp": "its plugin"}


def config(**said: Any) -> TrainerConfig:
    return TrainerConfig(job="job", generation=1, attempt_id="a", **{"batch": Batch(global_=1), **said})


REFUSED = [
    pytest.param({"precision": "bf16"}, "precision (theirs)", id="precision"),
    pytest.param({"activation_checkpointing": True}, "activationCheckpointing (the setting of", id="recomputing"),
    pytest.param({"compile": True}, "compile (the setting of that library)", id="compile"),
    pytest.param({"fsdp": FsdpConfig(sharding=Sharding.HYBRID)}, "fsdp.sharding (its plugin)", id="sharding"),
    pytest.param({"fsdp": FsdpConfig(reshard_after_forward=False)}, "fsdp.reshardAfterForward (", id="reshard"),
    pytest.param({"fsdp": FsdpConfig(offload=True)}, "fsdp.offload (its plugin)", id="offload"),
    pytest.param({"deepspeed": DeepSpeedConfig(zero_stage=1)}, "deepspeed.zeroStage (", id="zero-stage"),
    pytest.param({"deepspeed": DeepSpeedConfig(config={"a": 1})}, "deepspeed.config (", id="json"),
    pytest.param(
        {"precision": "bf16", "fsdp": FsdpConfig(offload=True)}, "precision (theirs), fsdp.offload (", id="several"
    ),
]


@pytest.mark.parametrize(("said", "sentence"), REFUSED)
def test_what_would_be_ignored_is_refused(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="leave them out of the job") as caught:
        refuse_unapplied(config(**said), INSTEAD)
    assert sentence in str(caught.value)


def test_what_applies_is_not() -> None:
    refuse_unapplied(config(strategy="ddp", seed=3, batch=Batch(global_=64, micro=8), min_world_size=2), INSTEAD)


def test_deepspeed_is_refused_also_where_nothing_is_spread_yet() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="needs spottrain's own loop"):
        check_spread("deepspeed", model, 1)
    for strategy in ("auto", "ddp", "fsdp"):
        check_spread(strategy, model, 1)
