"""What the cloud is about to do to a node.

The supervisor writes it to a file, and the metadata server reads it.
"""

import logging
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

logger = logging.getLogger(__name__)

InterruptionKind = Literal["preempt", "rebalance", "maintenance"]
Action = Literal["terminate", "stop", "hibernate"]

# What the metadata servers of each provider announce.
KINDS_OF_PROVIDER: Mapping[str, tuple[InterruptionKind, ...]] = {
    "eks": ("preempt", "rebalance", "maintenance"),
    "gke": ("preempt", "maintenance"),
    "aks": ("preempt", "maintenance"),
}


class Interruption(BaseModel):
    """A planned interruption.

    `notice_at` is when the cloud announces it for the first time.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    id: str
    kind: InterruptionKind = "preempt"
    action: Action = "terminate"
    notice_at: AwareDatetime
    deadline: AwareDatetime

    @property
    def takes_the_machine(self) -> bool:
        """Whether the machine is lost at the deadline.

        A rebalance recommendation only warns of a risk.
        """
        return self.kind != "rebalance"


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
