"""Files that the agent's own forked processes leave in the run directory.

They are in addition to those of the contract.
"""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from spottrain_api.contract.message import Message, Text

FILE_LAUNCHER = "launcher.json"  # LauncherEnded
FILE_TORCHRUN_LOG = "torchrun.log"


def worker_started_file(local_rank: int) -> str:
    return f"worker-{local_rank}.json"


def worker_ended_file(local_rank: int) -> str:
    return f"ended-{local_rank}.json"


class WorkerStarted(Message):
    """Written by a worker as its first act.

    Attributes:
        expects_session: Whether its script is going to open a session of the library.
    """

    pid: int
    started_at: datetime
    expects_session: bool = False


class WorkerEnded(Message):
    """Written by a worker when its script is over. It is missing if the process was killed or called `os._exit`.

    Attributes:
        exception: The qualified name of the exception's type.
        message: The last line of the traceback.
        traceback: Some lines above it.
    """

    exit_code: int
    exception: Text | None = None
    message: Text | None = None
    traceback: Text | None = None


class LauncherEnded(Message):
    """Written by the process that ran torchrun, unless it was killed.

    Attributes:
        exit_codes: Those of the failed workers by local rank. A negative one is a signal.
    """

    exit_codes: dict[int, int] = Field(default_factory=dict)
    exception: str | None = None
    message: str | None = None
