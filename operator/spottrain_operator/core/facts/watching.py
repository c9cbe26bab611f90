"""Who hears the notices for the members' spot nodes, by the reports of their agents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.notices import NodeWatch, WatchState
from spottrain_api.v1alpha1.status import GenerationStatus
from spottrain_operator.core.model import ReportView
from spottrain_operator.core.timing import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotWatch:
    """The watch of a member on a spot node, by its agent's newest report."""

    node: str
    watch: NodeWatch
    timing: Timing

    @property
    def unheard(self) -> bool:
        """Nobody hears the node's notices.

        That is no watcher's restart any more, nor the wait for a cloud's first answer.
        """
        return (
            self.watch.state in (WatchState.BLIND, WatchState.MISSING) and self.watch.seconds >= self.timing.unwatched
        )

    @property
    def settled(self) -> bool:
        return self.unheard or self.watch.state is WatchState.WATCHED


def spot_watches(
    generation: GenerationStatus | None, reports: Mapping[str, ReportView], timing: Timing
) -> tuple[SpotWatch, ...]:
    """The watch on each member's spot node, as its agent reports it."""
    return tuple(
        SpotWatch(node=member.node, watch=view.report.watch, timing=timing)
        for member in (generation.members if generation is not None else ())
        if member.capacity_type is CapacityType.SPOT
        and (view := reports.get(member.pod_uid)) is not None
        and view.report.watch is not None
    )
