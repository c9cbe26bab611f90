"""The rule for parts of different versions: a message says its version, and what is new in it is ignored."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from spottrain_api.contract.assignments import (
    AgentReport,
    Assignment,
    AssignmentAction,
    GenerationAssignment,
    Relay,
    RelayAssignment,
    RelayReport,
)
from spottrain_api.contract.configuration import TrainerConfig
from spottrain_api.contract.message import PeerMessage
from spottrain_api.contract.notices import NodeWatch, NoticeList, WatchState
from spottrain_api.contract.reports import Progress
from spottrain_api.settings.entrypoint import Entrypoint
from spottrain_api.settings.training import Batch

NOW = datetime(2026, 11, 22, tzinfo=UTC)
REPORT: dict[str, Any] = {
    "pod": "gpt-1",
    "pod_uid": "u",
    "rendezvous_port": 1,
    "progress": Progress(generation=1, updated_at=NOW),
    "watch": NodeWatch(state=WatchState.WATCHED),
    "sent_at": NOW,
}
ASSIGNED: dict[str, Any] = {
    "action": AssignmentAction.RUN,
    "generation": GenerationAssignment(
        number=1,
        rendezvous_id="r",
        rendezvous_endpoint="127.0.0.1:9",
        node_rank=0,
        num_nodes=1,
        entrypoint=Entrypoint(script="train.py"),
        trainer={},
    ),
    "relay": Relay(address="127.0.0.1:8", token="t"),
}
MESSAGES: tuple[PeerMessage, ...] = (
    AgentReport(**REPORT),
    RelayReport(**REPORT, peers=(AgentReport(**REPORT),)),
    Assignment(**ASSIGNED),
    RelayAssignment(**ASSIGNED, peers={"u": Assignment(**ASSIGNED)}),
    NoticeList(revision="1"),
    TrainerConfig(job="gpt", generation=1, attempt_id="a", batch=Batch(global_=8, micro=2)),
)
# Objects whose keys are no fields.
MAPPINGS = {"peers", "trainer", "milestones", "config"}


def of_a_later_version(content: Any, field: str = "") -> Any:
    """The same, with a field in each object that nobody knows yet."""
    if isinstance(content, list):
        return [of_a_later_version(each) for each in content]
    if not isinstance(content, dict):
        return content
    news = {} if field in MAPPINGS else {"newOfLater": {"of": "later"}}
    return {key: of_a_later_version(value, key) for key, value in content.items()} | news


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_new_in_a_message_is_ignored(message: PeerMessage) -> None:
    said = json.loads(message.to_json())
    assert said["protocolVersion"] == 1
    later = json.dumps(of_a_later_version(said) | {"protocolVersion": 2})
    assert type(message).from_json(later) == message.model_copy(update={"protocol_version": 2})


def kinds_of(model: type[PeerMessage]) -> set[type[PeerMessage]]:
    return {model}.union(*(kinds_of(each) for each in model.__subclasses__()))


def test_every_kind_of_message_is_among_them() -> None:
    assert kinds_of(PeerMessage) - {PeerMessage} == {type(message) for message in MESSAGES}
