"""The interruption of a node, read from a file that the supervisor writes."""

import logging
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

logger = logging.getLogger(__name__)


class Interruption(BaseModel):
    """A planned interruption. `notice_at` is when the cloud announces it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    kind: Literal["preempt", "rebalance", "maintenance"] = "preempt"
    action: Literal["terminate", "stop", "hibernate"] = "terminate"
    notice_at: AwareDatetime = Field(alias="noticeAt")
    deadline: AwareDatetime


def read_interruption(path: Path, now: datetime) -> Interruption | None:
    """Return the interruption that is announced at `now`, or None."""
    try:
        found = Interruption.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        logger.warning("%s cannot be read, so no interruption is announced: %s", path, error)
        return None
    return found if found.notice_at <= now else None
