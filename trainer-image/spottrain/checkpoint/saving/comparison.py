"""The exchange between the ranks before a save: what each is about to do, and whether they have the same."""

from __future__ import annotations

import torch.distributed as dist

from spottrain.checkpoint.collectives import Collectives
from spottrain.checkpoint.errors import CheckpointError
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.saving.alike import Alike
from spottrain.checkpoint.saving.frozen import FrozenWeights
from spottrain.checkpoint.saving.known_plan import KnownPlan
from spottrain.checkpoint.saving.parts import Agreement, Parts


class Comparison:
    """Compares the parts that the ranks are about to save. `group` None: a world of one."""

    def __init__(
        self, collectives: Collectives, plan: KnownPlan, frozen: FrozenWeights, group: dist.ProcessGroup | None
    ) -> None:
        self._collectives = collectives
        self._plan = plan
        self._frozen = frozen
        self._group = group

    def ahead(self, parts: Parts, alike: Alike) -> tuple[bool, bool]:
        """Compare `alike` long before a save. A collective.

        Returns:
            Whether the plan of a rank is outdated, and whether a rank has frozen weights that no commit holds.

        Raises:
            RanksDiffer: On all ranks: they differ in `alike`.
        """
        (outdated, unwritten), _, is_alike = self._collectives.agree(
            self._plan.is_outdated(parts.trained),
            self._frozen.is_unwritten(parts.frozen),
            digest=self._digest(alike),
        )
        self._check(alike, is_alike)
        return outdated, unwritten

    def of_save(self, found: tuple[Parts, bool] | CheckpointError, *, is_busy: bool) -> tuple[Parts, Agreement]:
        """Agree on what to do about a save, and compare the parts unless nothing is saved. A collective.

        The ranks finish their parts at different times, so they have to agree on what to do. They exchange one
        message for that, before they copy: a rank that has copied starts to write, and on busy processors that slows
        down the copies of the others.

        Args:
            found: This rank's parts, and whether it wants the save; or why it can't save.
            is_busy: Whether the previous save is under way on this rank.

        Raises:
            RanksDiffer: On all ranks: they differ in what the commit would hold once.
            CheckpointError: On all ranks: one of them can't save.
        """
        trained, once, wanted, digest = codec.Tensors(), codec.Tensors(), False, 0
        if not isinstance(found, CheckpointError):
            trained, once, wanted = found[0].trained, found[0].frozen, found[1]
            digest = 0 if is_busy else self._digest(found[0].alike)
        (failed, busy, wanted, outdated, unwritten), token, is_alike = self._collectives.agree(
            failed := isinstance(found, CheckpointError),
            is_busy,
            wanted,
            failed or self._plan.is_outdated(trained),
            self._frozen.is_unwritten(once),
            digest=digest,
        )
        parts, _ = self._collectives.unless_failed(found, failed)
        if wanted and not busy:
            self._check(parts.alike, is_alike)
        return parts, Agreement(
            is_busy=busy, is_wanted=wanted, is_outdated=outdated, has_unwritten=unwritten, token=token
        )

    def _digest(self, alike: Alike) -> int:
        return alike.digest() if self._group is not None else 0

    def _check(self, alike: Alike, is_alike: bool) -> None:
        """Raise RanksDiffer unless the ranks have the same. `is_alike`: the digests are equal."""
        if self._group is not None and not (is_alike and alike.shards_are_alike(self._group)):
            alike.raise_difference(self._group)
