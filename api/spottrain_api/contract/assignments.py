"""Assignments from the operator to agents, and reports from agents."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import AwareDatetime, Field

from spottrain_api.contract.configuration import DrainRequest
from spottrain_api.contract.message import Message, PeerMessage
from spottrain_api.contract.notices import NodeWatch, Notice
from spottrain_api.contract.replicas import HeldShards
from spottrain_api.contract.reports import CommitRef, Failure, Progress
from spottrain_api.settings.entrypoint import Entrypoint


class CapacityType(StrEnum):
    """How a node is bought.

    The values are those of Karpenter's `karpenter.sh/capacity-type`.

    - on-demand: at the full price, and kept until it is given back.
    - spot: at a lower price, and taken back by the cloud at short notice.
    """

    ON_DEMAND = "on-demand"
    SPOT = "spot"


class Member(Message):
    """One pod of a generation."""

    pod: Annotated[str, Field(description="Name of the pod.")]
    pod_uid: Annotated[str, Field(description="Uid of the pod.")]
    address: Annotated[str, Field(description="IP address of the pod.")]
    node: Annotated[str, Field(description="Name of the node.")]
    node_rank: Annotated[int, Field(description="Number of the member in the generation, from 0.")]
    capacity_type: CapacityType
    replica_port: Annotated[
        int | None,
        Field(description="Port at which the member takes replicas. Absent if it takes none."),
    ] = None


class GenerationAssignment(Message):
    """A generation as the operator assigns it to one member.

    `trainer` is the JSON of a TrainerConfig. The agent hands it to the ranks as it is: a value that only a newer
    version knows is for them to refuse, with a sentence. `replica_token` opens the agent's memory to the generation.
    """

    number: int
    rendezvous_id: str
    rendezvous_endpoint: str  # "address:port" on the member with node rank 0
    node_rank: int
    num_nodes: int
    processes_per_node: int = 1
    entrypoint: Entrypoint
    trainer: dict[str, Any]
    replica_token: str | None = None


class Relay(Message):
    """The agent of node rank 0, which passes on its peers' reports and assignments.

    - address: "address:port", which speaks HTTP.
    - token: with it, relay and peers prove their messages to each other. It never crosses that wire.
    """

    address: str
    token: str


class AssignmentAction(StrEnum):
    """What the agent has to do.

    - wait: stay ready for the next generation.
    - run: run the generation.
    - drain: drain the generation.
    - stop: stop the generation at once.
    - exit: end, and with it the pod.
    """

    WAIT = "wait"
    RUN = "run"
    DRAIN = "drain"
    STOP = "stop"
    EXIT = "exit"


class Assignment(PeerMessage):
    """What one agent has to do now; a pure function of the job's status.

    STOP and DRAIN name their generation, so that a late message can't hit the next one.
    `show_stacks`: a STOP because of a hang; the agent first logs where each rank stands.
    `shutdown_grace_seconds` is what the shutdown of the agent's node leaves its pods, if that is known.
    `watcher` is the mark of the node's watcher (`watcher_mark`); "" if it has none.
    `relay` is where the agent may ask and report instead. None if there is none, or not yet.
    """

    action: AssignmentAction
    generation: GenerationAssignment | None = None
    drain: DrainRequest | None = None
    show_stacks: bool | None = None
    shutdown_grace_seconds: float | None = None
    watcher: str = ""
    relay: Relay | None = None

    @property
    def revision(self) -> str:
        """Hash of the content, without the relay.

        It stays the same when the operator restarts, which learns of relays by the agents' next reports.
        """
        return hashlib.sha256(self._lasting().encode()).hexdigest()[:16]

    def _lasting(self) -> str:
        return self.model_dump_json(by_alias=True, exclude_none=True, exclude={"relay"})

    def shifted(self, offset: timedelta) -> Self:
        """The same by a clock that is ahead by `offset`."""
        return self.model_copy(update={"drain": self.drain.shifted(offset)}) if self.drain is not None else self


class RelayAssignment(Assignment):
    """An assignment for an agent that can relay, with those of its peers.

    `peers` are the other members of the generation in which the agent has node rank 0, by pod uid. None if there are
    none.
    """

    peers: dict[str, Assignment] | None = None

    def _lasting(self) -> str:
        own = self.model_dump_json(by_alias=True, exclude_none=True, exclude={"relay", "peers"})
        return own + "".join(f" {uid} {peer.revision}" for uid, peer in sorted((self.peers or {}).items()))

    def shifted(self, offset: timedelta) -> Self:
        peers = {uid: peer.shifted(offset) for uid, peer in self.peers.items()} if self.peers is not None else None
        return super().shifted(offset).model_copy(update={"peers": peers})


class AgentPhase(StrEnum):
    """State of the agent's torchrun for `AgentReport.generation`, or how it ended."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    DRAINED = "drained"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class AgentReport(PeerMessage):
    """An agent's whole current state.

    The agent sends it at once if its `news` change, and otherwise now and then.

    - generation: 0 until the agent has run one.
    - warm: whether the interpreter is ready, with torch imported, to start a generation at once.
    - rendezvous_port: a free port at the pod's address, for the store of the next generation.
    - step_age_seconds: time since the newest step, or since the start of the generation before its first step, by
      the agent's monotonic clock.
    - replica_port: port at which this member keeps replicated shards, its own and those of its peers.
    - held: what it holds of replicated steps, oldest first.
    - watch: whether it can hear the notices for its node. None on an on-demand node.
    - relay_port, relay_token: where it would relay its peers, with node rank 0. None in what a relay passes on: the
      token doesn't cross that wire.
    - process, number: of two reports of a process, the one with the higher number is newer, whichever way they came.
    """

    pod: str
    pod_uid: str
    generation: int = 0
    phase: AgentPhase = AgentPhase.IDLE
    warm: bool = False
    rendezvous_port: int
    progress: Progress | None = None
    step_age_seconds: float | None = None
    commit: CommitRef | None = None
    failure: Failure | None = None
    notices: tuple[Notice, ...] = ()
    replica_port: int | None = None
    held: tuple[HeldShards, ...] = ()
    watch: NodeWatch | None = None
    relay_port: int | None = None
    relay_token: str | None = None
    process: str = ""
    number: int = 0
    sent_at: AwareDatetime

    def shifted(self, offset: timedelta) -> Self:
        """The same by a clock that is ahead by `offset`.

        Notices are as their watcher wrote them.
        """
        progress = self.progress.shifted(offset) if self.progress is not None else None
        return self.model_copy(update={"progress": progress, "sent_at": self.sent_at + offset})

    def is_older_than(self, other: AgentReport) -> bool:
        """Whether the same process made `other` later."""
        return self.process == other.process and self.number < other.number

    @property
    def stalled(self) -> bool:
        """Whether steps that came no longer come, or none has come yet."""
        usual = self.progress.step_seconds if self.progress is not None else None
        age = self.step_age_seconds
        return age is not None and age > max(STALLED_SECONDS, STALLED_STEPS * (usual or 0.0))

    @property
    def news(self) -> tuple[object, ...]:
        """What the operator decides by, and what the agent reports at once.

        All other fields, such as the step, can wait.
        """
        progress = self.progress
        return (self.news_but_commits, self.commit, progress.commit if progress is not None else None)

    @property
    def news_but_commits(self) -> tuple[object, ...]:
        """The news other than commits.

        Commits go on for as long as the ranks train, and change nothing else.
        """
        progress = self.progress
        news = None if progress is None else progress.model_dump(include=_NEWS_OF_PROGRESS)
        return (
            *(self.generation, self.phase, self.warm, self.rendezvous_port, self.replica_port),
            *(self.relay_port, self.relay_token),
            *(self.failure, self.notices, self.stalled),
            *(news, self.watch.state if self.watch is not None else None),
        )


class RelayReport(AgentReport):
    """A report of an agent that can relay, with those of its peers.

    - present: uids of the peers that hold a poll at the relay: they are there as long as this agent is. None: it
      doesn't say, as it leaves, and its peers come themselves.
    - peers: their reports, if they have changed.
    """

    present: tuple[str, ...] | None = None
    peers: tuple[AgentReport, ...] = ()


# Steps that take longer than this, and than several others, are news.
STALLED_SECONDS = 5.0
STALLED_STEPS = 5.0
_NEWS_OF_PROGRESS = {
    *("generation", "phase", "first_step_at", "checkpoint_failure", "clean_up_failure", "drain_seen_at"),
    *("skipped_steps", "rollbacks", "message", "strategy"),
}
