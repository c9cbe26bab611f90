"""Messages to ranks in the run directory.

They are the settings of the job, and requests to drain.
"""

from __future__ import annotations

from datetime import timedelta

from pydantic import AwareDatetime

from spottrain_api.contract.message import Message, PeerMessage
from spottrain_api.contract.replicas import ReplicaSettings
from spottrain_api.contract.reports import CommitRef
from spottrain_api.settings.training import TrainingSettings


class DrainRequest(Message):
    """Request to stop together at a step boundary.

    The ranks commit there and end as `drained`.

    Attributes:
        is_preemption: Whether a cloud takes a node at the deadline. If so, stopping long before it gains nothing.
    """

    reason: str
    deadline: AwareDatetime
    requested_at: AwareDatetime
    is_preemption: bool = False

    def shifted(self, offset: timedelta) -> DrainRequest:
        """The same request by a clock that is ahead by `offset`."""
        moments = {"deadline": self.deadline + offset, "requested_at": self.requested_at + offset}
        return self.model_copy(update=moments)


class Interruptions(Message):
    """Preemptions of the job before this generation.

    Attributes:
        num: All of them.
        num_noticed: Those that came with notice.
        num_covered: Those without notice after which training resumed from replicas.
        observed_seconds: Duration of the time in which they are counted, without suspensions and waits for nodes.
    """

    num: int = 0
    num_noticed: int = 0
    num_covered: int = 0
    observed_seconds: float = 0.0


class TrainerConfig(TrainingSettings, PeerMessage):
    """Configuration of the ranks of a generation (run.json).

    It holds the job's settings and its context.

    Attributes:
        attempt_id: Unique for each generation; also torchrun's rendezvous id.
        min_world_size: The smallest world size that the job may have. None: that of this generation.
        max_world_size: The largest world size that the job may have. None: that of this generation.
        interruptions: Input of `checkpoint.interval: auto`.
        resume: The newest commit that the operator knows. Ranks read HEAD themselves; a HEAD older than this is an
            error.
    """

    job: str
    namespace: str = "default"
    generation: int
    attempt_id: str
    min_world_size: int | None = None
    max_world_size: int | None = None
    interruptions: Interruptions = Interruptions()
    resume: CommitRef | None = None
    replicas: ReplicaSettings | None = None
