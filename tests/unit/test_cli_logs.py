"""`spottrain logs` prints each line of the wanted member once.

Generations may change and connections may break in between.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from spottrain_api.contract.assignments import CapacityType, Member
from spottrain_api.v1alpha1.status import GenerationState, GenerationStatus, Phase, TrainingJobStatus
from spottrain_cli.api_access import UserError
from spottrain_cli.logs import Follower

START = datetime(2026, 1, 1, tzinfo=UTC)
Line = tuple[float, str]


def generation(number: int, *pods: str, at: float = 0.0) -> GenerationStatus:
    members = tuple(
        Member(
            pod=pod, pod_uid=pod, address="127.1.0.2", node="n", node_rank=rank, capacity_type=CapacityType.ON_DEMAND
        )
        for rank, pod in enumerate(pods)
    )
    return GenerationStatus(
        number=number,
        state=GenerationState.ACTIVE,
        rendezvous_id="r",
        rendezvous_endpoint="127.1.0.2:1",
        world_size=len(pods),
        members=members,
        started_at=START + timedelta(seconds=at),
    )


def status(phase: Phase, newest: GenerationStatus | None = None, message: str = "") -> TrainingJobStatus:
    return TrainingJobStatus(phase=phase, generation=newest, message=message)


@dataclass
class ScriptedLogs:
    """A job whose status moves on once the lines that it waits for are printed.

    `connections` has for each pod the lines of one connection after the other, or an error.
    """

    statuses: list[tuple[TrainingJobStatus, str]]
    connections: dict[str, list[list[Line] | UserError]]
    printed: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def status(self) -> TrainingJobStatus:
        """The next status, once the line is printed that stands beside it."""
        now, until = self.statuses[0]
        if len(self.statuses) > 1 and (not until or until in self.printed):
            self.statuses.pop(0)
        return now

    def lines(self, pod: str, since: datetime) -> Iterator[tuple[datetime, str]]:
        connections = self.connections[pod]
        current = connections.pop(0) if len(connections) > 1 else connections[0]
        if isinstance(current, UserError):
            raise current
        for at, text in current:
            yield START + timedelta(seconds=at), text

    def follow(self, *ranks: int, prefix: bool = False) -> Phase:
        follower = Follower(
            self,
            wanted=lambda member: member.node_rank in ranks,
            prefix=prefix,
            write=self.printed.append,
            remark=self.remarks.append,
        )
        return follower.run()


def test_rank_0_is_followed_from_pod_to_pod() -> None:
    logs = ScriptedLogs(
        statuses=[
            (status(Phase.PENDING, message="Waiting for nodes"), ""),
            (status(Phase.RUNNING, generation(1, "a", "b")), "a, step 2"),
            (status(Phase.RUNNING, generation(2, "b", at=10)), "b, step 3"),
            (status(Phase.SUCCEEDED, generation(2, "b", at=10), "trained to step 4"), ""),
        ],
        connections={
            "a": [[(1, "a, step 1"), (2, "a, step 2")]],
            "b": [[(1, "b, as rank 1"), (11, "b, step 3")], [(11, "b, step 3"), (12, "b, step 4")]],
        },
    )
    assert logs.follow(0) is Phase.SUCCEEDED
    assert logs.printed == ["a, step 1", "a, step 2", "b, step 3", "b, step 4"]
    assert logs.remarks == [
        "Waiting for nodes",
        "Generation 1: node rank 0 on a.",
        "Generation 2: node rank 0 on b.",
        "Succeeded: trained to step 4",
    ]


def test_a_broken_connection_repeats_and_loses_nothing() -> None:
    logs = ScriptedLogs(
        statuses=[
            (status(Phase.RUNNING, generation(1, "a")), "three"),
            (status(Phase.FAILED, generation(1, "a"), "it raised"), ""),
        ],
        connections={
            "a": [
                [(1, "one"), (1, "one, at the same moment")],
                UserError("The API server does not answer."),
                [(1, "one"), (1, "one, at the same moment"), (2, "two"), (3, "three")],
            ]
        },
    )
    assert logs.follow(0) is Phase.FAILED
    assert logs.printed == ["one", "one, at the same moment", "two", "three"]
    assert logs.remarks[-1] == "Failed: it raised"


def test_all_members_are_followed_with_their_names() -> None:
    logs = ScriptedLogs(
        statuses=[
            (status(Phase.RUNNING, generation(1, "a", "b")), ""),
            (status(Phase.SUCCEEDED, generation(1, "a", "b")), ""),
        ],
        connections={"a": [[(1, "one")]], "b": [[(1, "two")]]},
    )
    logs.follow(0, 1, prefix=True)
    assert sorted(logs.printed) == ["[a] one", "[b] two"]


class LongLogs(ScriptedLogs):
    """The next line comes once the one before is printed."""

    def lines(self, pod: str, since: datetime) -> Iterator[tuple[datetime, str]]:
        for at, text in super().lines(pod, since):
            yield at, text
            while text not in self.printed:
                time.sleep(0.01)


def test_the_log_of_a_job_that_has_ended_is_shown_to_its_end() -> None:
    ended = status(Phase.FAILED, generation(1, "a"), "it raised")
    logs = LongLogs(statuses=[(ended, "")], connections={"a": [[(1, "one"), (2, "two"), (3, "three")]]})
    assert logs.follow(0) is Phase.FAILED
    assert logs.printed == ["one", "two", "three"]


class LateLogs(ScriptedLogs):
    """All but one line of pod a arrive after node rank 0 has moved to pod b."""

    def lines(self, pod: str, since: datetime) -> Iterator[tuple[datetime, str]]:
        for number, line in enumerate(super().lines(pod, since)):
            while pod == "a" and number and "Generation 2: node rank 0 on b." not in self.remarks:
                time.sleep(0.01)
            yield line


def test_what_a_pod_said_as_rank_0_is_shown_after_rank_0_has_moved() -> None:
    moved = generation(2, "b", "a", at=10)
    logs = LateLogs(
        statuses=[
            (status(Phase.RUNNING, generation(1, "a", "b")), "a, step 1"),
            (status(Phase.RUNNING, moved), "b, step 3"),
            (status(Phase.SUCCEEDED, moved), ""),
        ],
        connections={
            "a": [[(1, "a, step 1"), (2, "a, step 2"), (9, "a raised"), (20, "a, as rank 1")]],
            "b": [[(11, "b, step 3")]],
        },
    )
    assert logs.follow(0) is Phase.SUCCEEDED
    assert sorted(logs.printed) == ["a raised", "a, step 1", "a, step 2", "b, step 3"]


def test_a_log_that_is_gone_is_said() -> None:
    ended = status(Phase.FAILED, generation(1, "a"), "its node is gone")
    logs = ScriptedLogs(statuses=[(ended, "")], connections={"a": [UserError("Pod a is gone.")]})
    assert logs.follow(0) is Phase.FAILED
    assert logs.remarks == ["Generation 1: node rank 0 on a.", "Pod a is gone.", "Failed: its node is gone"]


def test_a_rank_that_no_member_has_is_refused() -> None:
    logs = ScriptedLogs(statuses=[(status(Phase.RUNNING, generation(1, "a", "b")), "")], connections={})
    with pytest.raises(UserError, match="its node ranks are 0 to 1"):
        logs.follow(2)
