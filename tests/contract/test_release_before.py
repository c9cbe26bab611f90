"""This release and the one before it understand each other's messages.

release_before.json has a sample of each message of the release before, with the JSON schema. So the tests need no
history.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from message_samples import MESSAGES, least, sample
from spottrain_api.contract import (
    AgentReport,
    Assignment,
    Message,
    NodeWatch,
    PeerMessage,
    RelayAssignment,
    RelayReport,
    WatchState,
)

BEFORE: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("release_before.json").read_text())
# Values that the release before doesn't know. `NodeWatch.understood_by` doesn't send them to it.
KEPT_FROM_IT = {"AgentReport": {"WatchState": {"starting"}}}
# Fields of the release before that nothing read. They are gone.
NEVER_READ = {"samplesPerSecond"}


def contents(recorded: Any, read: Any) -> Any:
    """The part of what was read that was recorded, and what nothing read."""
    if isinstance(recorded, dict) and isinstance(read, dict):
        return {
            key: value if key in NEVER_READ else contents(value, read.get(key)) for key, value in recorded.items()
        }
    if isinstance(recorded, list) and isinstance(read, list):
        return [contents(one, other) for one, other in zip(recorded, read, strict=True)]
    return read


@pytest.mark.parametrize("model", MESSAGES, ids=lambda model: model.__name__)
def test_nothing_of_what_the_release_before_says_is_lost(model: type[PeerMessage]) -> None:
    recorded = BEFORE[model.__name__]["sample"]
    found = model.from_json(json.dumps(recorded))
    assert contents(recorded, json.loads(found.to_json())) == recorded
    assert found.protocol_version == recorded.get("protocolVersion", 0)


@pytest.mark.parametrize("model", MESSAGES, ids=lambda model: model.__name__)
@pytest.mark.parametrize("say", [sample, least], ids=["all fields", "required fields"])
def test_the_release_before_understands_what_is_said_now(model: type[Message], say: Any) -> None:
    said = json.loads(model.model_validate(say(model)).to_json())
    jsonschema.validate(said, BEFORE[model.__name__]["schema"])


@pytest.mark.parametrize("model", MESSAGES, ids=lambda model: model.__name__)
def test_it_knows_all_values_that_it_is_sent(model: type[BaseModel]) -> None:
    """A message with one value that its reader doesn't know can't be read at all."""
    known = {name: set(each["enum"]) for name, each in enums(BEFORE[model.__name__]["schema"])}
    new = {
        name: unknown
        for name, each in enums(model.model_json_schema())
        if (unknown := set(each["enum"]) - known.get(name, set(each["enum"])))
    }
    assert new == KEPT_FROM_IT.get(model.__name__, {})


@pytest.mark.parametrize(("model", "of_before"), [(RelayReport, AgentReport), (RelayAssignment, Assignment)])
def test_messages_with_peers_are_read_as_those_without(model: type[PeerMessage], of_before: type[Message]) -> None:
    """Whoever knows no relays reads them so.

    The other way round, a message without peers is one of an agent alone.
    """
    peers: Any = [sample(AgentReport)] if model is RelayReport else {"uid": sample(Assignment)}
    said = json.loads(model.model_validate(sample(of_before) | {"peers": peers, "present": ["uid"]}).to_json())
    jsonschema.validate(said, BEFORE[of_before.__name__]["schema"])
    alone = model.from_json(json.dumps(BEFORE[of_before.__name__]["sample"]))
    assert not alone.model_dump(include={"peers", "present"}, exclude_defaults=True)


def test_the_revision_of_an_assignment_is_that_of_agents_without_relays() -> None:
    """They hash what they understand, and would ask again and again otherwise."""
    told = Assignment.model_validate(sample(Assignment))
    understood = told.model_copy(update={"relay": None})
    assert told.relay is not None
    assert told.revision == understood.revision == hashlib.sha256(understood.to_json().encode()).hexdigest()[:16]
    assert RelayAssignment(**dict(told)).revision == told.revision


def enums(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, each) for name, each in schema["$defs"].items() if "enum" in each]


def test_the_state_of_a_watcher_in_words_that_older_operators_know() -> None:
    starting = NodeWatch(state=WatchState.STARTING, seconds=3.0, trouble="It waits.")
    assert starting.understood_by(0) == starting.model_copy(update={"state": WatchState.BLIND})
    assert starting.understood_by(1) == starting
    assert NodeWatch(state=WatchState.MISSING).understood_by(0).state is WatchState.MISSING


def kinds_of(model: type[PeerMessage]) -> set[type[PeerMessage]]:
    return {model}.union(*(kinds_of(each) for each in model.__subclasses__()))


def test_every_message_carries_its_version() -> None:
    kinds = kinds_of(PeerMessage) - {PeerMessage}
    assert kinds == {RelayReport, RelayAssignment, *MESSAGES}, "a new message belongs into MESSAGES"
    for model in kinds:
        said = json.loads(model.model_validate(least(model)).to_json())
        assert model.from_json(json.dumps(said)).protocol_version == said["protocolVersion"] == 1
        # Of a later version: what is new in it is ignored.
        later = said | {"protocolVersion": 2, "news": {"of": "later"}}
        assert model.from_json(json.dumps(later)).protocol_version == 2


def test_the_samples_have_every_field() -> None:
    for model in MESSAGES:
        left_out = {field.alias for field in model.model_fields.values()} - sample(model).keys()
        assert left_out == set(), model.__name__
    assert sample(AgentReport)["watch"]["trouble"] == "text"
