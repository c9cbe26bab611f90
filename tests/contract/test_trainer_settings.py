"""What the spec says to the training loop reaches the ranks: the messages have its fields, with its defaults."""

from __future__ import annotations

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from spottrain_api import contract, v1alpha1

# Ranks get these as ReplicaSettings.
ELSEWHERE = {"peer_replicas", "peer_interval"}
PARTS: tuple[tuple[type[BaseModel], type[BaseModel]], ...] = (
    (v1alpha1.EntrypointSpec, contract.Entrypoint),
    (v1alpha1.Fsdp, contract.FsdpConfig),
    (v1alpha1.DeepSpeed, contract.DeepSpeedConfig),
    (v1alpha1.Checkpoint, contract.CheckpointConfig),
    (v1alpha1.Stability, contract.StabilityConfig),
    (v1alpha1.LossSpike, contract.LossSpikeConfig),
)


def _default(field: FieldInfo) -> object:
    """The default as plain values."""
    value = field.get_default(call_default_factory=True, validated_data={})
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


@pytest.mark.parametrize(("part", "message"), [pytest.param(p, m, id=p.__name__) for p, m in PARTS])
def test_a_message_has_every_setting_of_its_part_of_the_spec(part: type[BaseModel], message: type[BaseModel]) -> None:
    assert part.model_fields.keys() - ELSEWHERE <= message.model_fields.keys()
    for name, field in message.model_fields.items():
        wanted = part.model_fields.get(name)
        if wanted is not None and not wanted.is_required():
            assert _default(field) == _default(wanted), f"{part.__name__}.{name} has two defaults"


def test_the_settings_beside_the_parts_have_the_spec_s_defaults() -> None:
    spec, message = v1alpha1.TrainingJobSpec.model_fields, contract.TrainerConfig.model_fields
    shared = {name for name in spec.keys() & message.keys() if not spec[name].is_required()}
    assert {"seed", "strategy", "precision", "activation_checkpointing", "compile", "fsdp", "stability"} <= shared
    assert [name for name in shared if _default(spec[name]) != _default(message[name])] == []
