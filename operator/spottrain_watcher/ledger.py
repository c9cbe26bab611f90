"""The present notices of all sources. Pure.

A source reports its whole state. So a repeated or late signal changes nothing, and a missing one is a cancellation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from spottrain_api.contract.notices import POD_NOTICE_PREFIX, Notice, NoticeList

# A cancelled notice is repeated as cancelled for this long, for agents that have not heard of it yet.
CANCELLED_KEPT = timedelta(minutes=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Notices by source, and those that were cancelled lately.

    Attributes:
        by_source: The newest notices of each source that has reported.
        cancelled: The notice and the time of its cancellation, by id.
    """

    by_source: Mapping[str, tuple[Notice, ...]] = field(default_factory=dict)
    cancelled: Mapping[str, tuple[Notice, datetime]] = field(default_factory=dict)

    def observe(self, source: str, notices: tuple[Notice, ...], now: datetime) -> Ledger:
        """The ledger after `source` has announced `notices`, and nothing else."""
        before = {notice.id: notice for notice in self.by_source.get(source, ())}
        kept = tuple(merged(before.get(notice.id), notice) for notice in _distinct(notices))
        after = replace(self, by_source={**self.by_source, source: kept})
        standing = {notice.id for notice in after.standing()}
        cancelled = {
            key: (notice, since)
            for key, (notice, since) in self.cancelled.items()
            if key not in standing and now - since < CANCELLED_KEPT
        }
        for key, notice in before.items():
            if key not in standing:
                cancelled[key] = (notice.model_copy(update={"cancelled": True}), now)
        return replace(after, cancelled=cancelled)

    def standing(self) -> tuple[Notice, ...]:
        """The notices in force, the earliest deadline first.

        Of two with the same id, only the one with the earlier deadline counts.
        """
        first: dict[str, Notice] = {}
        for notices in self.by_source.values():
            for notice in notices:
                other = first.get(notice.id)
                if other is None or notice.deadline < other.deadline:
                    first[notice.id] = notice
        return tuple(sorted(first.values(), key=lambda notice: (notice.deadline, notice.id)))

    def notice_list(
        self, trouble: str | None = None, *, starting: bool = False, hears_cloud: bool = True
    ) -> NoticeList:
        """For the agents: the notices in force, then those that were cancelled lately.

        Args:
            trouble: Why some sources can't be heard.
            starting: Whether that is only because they have not given their first answer yet.
            hears_cloud: Whether the cloud's metadata is one of the sources.
        """
        gone = sorted((notice for notice, _ in self.cancelled.values()), key=lambda notice: notice.id)
        notices = (*self.standing(), *gone)
        content = [*(notice.to_json() for notice in notices), *([trouble, str(starting)] if trouble else ())]
        if not hears_cloud:
            content.append("no cloud")
        digest = hashlib.sha256("\n".join(content).encode())
        return NoticeList(
            revision=digest.hexdigest()[:16],
            notices=notices,
            trouble=trouble,
            starting=starting,
            hears_cloud=hears_cloud,
        )

    def for_node(self) -> Notice | None:
        """The most important notice for the whole node.

        A loss comes before a risk of one.
        """
        notices = [notice for notice in self.standing() if not notice.id.startswith(POD_NOTICE_PREFIX)]
        return min(notices, key=lambda notice: (not notice.makes_drain, notice.deadline), default=None)


def _distinct(notices: tuple[Notice, ...]) -> tuple[Notice, ...]:
    first: dict[str, Notice] = {}
    for notice in notices:
        first[notice.id] = merged(first.get(notice.id), notice)
    return tuple(first.values())


def merged(earlier: Notice | None, notice: Notice) -> Notice:
    """Merge two signals of one event.

    The result has the time at which the event was first seen, and the earlier deadline.
    """
    if earlier is None:
        return notice
    return notice.model_copy(
        update={
            "deadline": min(earlier.deadline, notice.deadline),
            "observed_at": min(earlier.observed_at, notice.observed_at),
        }
    )
