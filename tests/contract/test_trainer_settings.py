"""Settings of the spec reach the ranks.

They do at any versions of operator and agent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from derived_values import completed
from scene import training_job
from spottrain.world.failures import UserError, as_user_errors
from spottrain_agent.run_directory import RunDirectory
from spottrain_api.contract.assignments import GenerationAssignment
from spottrain_api.contract.configuration import TrainerConfig
from spottrain_api.contract.names import FILE_RUN
from spottrain_api.crd import structural_schema
from spottrain_api.settings.training import TrainingSettings
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.core.assignments import assignment_for

# Values of fields that don't follow from the schema, or that have to fit each other.
_GIVEN: dict[str, Any] = {
    "strategy": "deepspeed",
    "precision": "fp16",
    "deepspeed": {
        "zeroStage": 3,
        "offloadOptimizer": True,
        "offloadParameters": True,
        "config": {"zero_optimization": {"stage3_prefetch_bucket_size": 7, "sub_group_size": None}},
    },
    "batch": {"global": 96, "micro": 12, "multipleOf": 4},
    "seed": 7,
    "checkpoint": {
        "uri": "s3://elsewhere/run",
        "interval": "5m",
        "keep": 4,
        "keepEvery": 1000,
        "peerReplicas": 1,
        "peerInterval": 3,
        "endpointURL": "http://store:9000",
        "encryption": "AES256",
    },
    "stability": {
        "lossSpike": {"factor": 2.5, "window": 20, "action": "skip"},
        "maxRollbacks": 9,
    },
}
SPEC = structural_schema(TrainingJobSpec)
NAMES = {field.alias or "" for field in TrainingSettings.model_fields.values()}
_SCHEMA = {"properties": {name: SPEC["properties"][name] for name in NAMES}}
# A value other than the default in every field.
SETTINGS = completed(_GIVEN, _SCHEMA)
ENTRYPOINT = {"module": "train", "args": ["--fast"], "workingDir": "/src"}
Place = tuple[str, ...]


def assigned(**settings: Any) -> GenerationAssignment:
    """What the operator assigns to a member of a job with these settings."""
    assignment = assignment_for(training_job(entrypoint=ENTRYPOINT, **SETTINGS | settings).observed.job, "u1")
    assert assignment.generation is not None
    return assignment.generation


def handed_on(message: str, folder: Path) -> Path:
    """What an agent that receives this message gives to its ranks."""
    generation = GenerationAssignment.from_json(message)
    directory = RunDirectory(folder, generation.number)
    directory.create(generation.trainer)
    return directory.path / FILE_RUN


def fields(schema: dict[str, Any], path: Place = ()) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Every field of the settings, and its schema."""
    for name, field in schema.get("properties", {}).items():
        yield (*path, name), field
        yield from fields(field, (*path, name))


FIELDS = {path: field for path, field in fields(SPEC) if path[0] in NAMES}
OBJECTS = [(), *(path for path, field in FIELDS.items() if "properties" in field)]
CHOICES = [path for path, field in FIELDS.items() if "enum" in field]


def value_at(settings: Any, path: Place) -> Any:
    for name in path:
        settings = settings[name]
    return settings


def setting(path: Place) -> Any:
    try:
        return value_at(SETTINGS, path)
    except KeyError:
        pytest.fail(f"{'.'.join(path)} is not in _GIVEN: add a value other than the default there")


def test_a_new_setting_needs_a_value() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"^batch\.colour is not in _GIVEN: add a value"):
        setting(("batch", "colour"))


def with_value(settings: dict[str, Any], path: Place, value: object) -> dict[str, Any]:
    """A copy of the settings that has `value` at `path`."""
    name, *rest = path
    return settings | {name: with_value(settings[name], tuple(rest), value) if rest else value}


@pytest.mark.parametrize("path", FIELDS, ids=".".join)
def test_every_setting_of_the_spec_reaches_the_ranks(path: Place, tmp_path: Path) -> None:
    wanted = setting(path)
    config = TrainerConfig.read(handed_on(assigned().to_json(), tmp_path))
    assert config is not None
    assert value_at(config.to_dict(), path) == wanted
    assert wanted != FIELDS[path].get("default"), "choose another value than the default"


def test_ranks_have_the_defaults_of_the_spec(tmp_path: Path) -> None:
    job = training_job().observed.job
    generation = assignment_for(job, "u1").generation
    assert generation is not None
    config = TrainerConfig.read(handed_on(generation.to_json(), tmp_path))
    assert config is not None
    told, spec = config.to_dict(), job.spec.to_dict()
    assert {name: told.get(name) for name in NAMES} == {name: spec.get(name) for name in NAMES}


def test_the_program_reaches_the_ranks() -> None:
    received = GenerationAssignment.from_json(assigned().to_json())
    assert received.entrypoint.to_dict() == ENTRYPOINT


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: ".".join(path) or "top")
def test_a_field_that_only_a_newer_version_knows_is_refused_in_a_spec_and_ignored_in_a_message(
    path: Place, tmp_path: Path
) -> None:
    newer = with_value(SETTINGS, (*path, "colour"), "red") if path else SETTINGS | {"colour": "red"}
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        TrainingJobSpec.model_validate(training_job().observed.job.spec.to_dict() | newer)
    message = assigned().model_copy(update={"trainer": assigned().trainer | newer})
    run = handed_on(message.to_json(), tmp_path)
    assert value_at(json.loads(run.read_text()), path)["colour"] == "red", "the agent leaves it to the ranks"
    assert TrainerConfig.read(run) == TrainerConfig.model_validate(assigned().trainer)


@pytest.mark.parametrize("path", CHOICES, ids=".".join)
def test_a_choice_that_only_a_newer_version_knows_ends_the_ranks_with_a_sentence(path: Place, tmp_path: Path) -> None:
    trainer = with_value(assigned().trainer, path, "newest")
    run = handed_on(assigned().model_copy(update={"trainer": trainer}).to_json(), tmp_path)
    sentence = f"^{'.'.join(path)} 'newest' is unknown; use {FIELDS[path]['enum'][0]}"
    with pytest.raises(UserError, match=sentence), as_user_errors():
        TrainerConfig.read(run)
