"""Which save is tried: read back in part before it counts."""

from __future__ import annotations

from spottrain.checkpoint.format.dcp import RankPlan
from spottrain.checkpoint.saving.save_handle import SaveHandle


class Trial:
    """Remembers by which plan a save was tried, as each plan's first save is."""

    def __init__(self) -> None:
        self._newest: tuple[RankPlan, SaveHandle] | None = None

    def is_due(self, plan: RankPlan, handle: SaveHandle) -> bool:
        """Whether no save by this plan was tried, or that one failed. If so, this save is the trial."""
        if self._newest is not None and self._newest[0] is plan and self._newest[1].error is None:
            return False
        self._newest = plan, handle
        return True
