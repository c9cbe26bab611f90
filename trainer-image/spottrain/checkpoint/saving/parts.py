"""What one rank saves, before and after it is staged, and what the ranks agree on in between."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from spottrain.checkpoint.format import codec
from spottrain.checkpoint.format.manifest import Receipt
from spottrain.checkpoint.saving.alike import Alike, Path
from spottrain.checkpoint.saving.frozen import FrozenPart, FrozenWeights
from spottrain.checkpoint.saving.pieces import StagedPieces
from spottrain.checkpoint.saving.staging import Staged


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts that one rank saves: tensors, and everything else as JSON.

    Attributes:
        tensors: All tensors by name, with those of this rank's own.
        trained: Those that every save writes.
        frozen: The others, which are written once.
        tree: The state with its tensors replaced by their names.
        extra: Values that are stored beside the state.
        rank_state: Values of this rank's own, with its tensors replaced by their names.
        alike: What has to be the same on all ranks.
    """

    tensors: codec.Tensors
    trained: codec.Tensors
    frozen: codec.Tensors
    tree: codec.Json
    extra: codec.Json
    rank_state: codec.Json
    alike: Alike

    @classmethod
    def of(
        cls,
        state: dict[str, Any],
        frozen: Collection[str],
        extra: dict[str, Any] | None,
        rank_state: dict[str, Any] | None,
        alike: Collection[Path],
        weights: FrozenWeights,
        rank: int,
    ) -> Parts:
        """Split what a save is given; `weights` knows which frozen tensors are written. Raises UnsupportedState."""
        tensors, tree = codec.split(state)
        trained, once = weights.split(tensors, frozen)
        values = codec.encode(extra or {})
        own, of_rank = codec.encode_of_rank(rank_state, rank)
        return cls(
            tensors=tensors | own,
            trained=trained | own,
            frozen=once,
            tree=tree,
            extra=values,
            rank_state=of_rank,
            alike=Alike.of(trained, tree, values, alike),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What all ranks know about a save before they copy their parts.

    Attributes:
        is_busy: Whether the previous save is under way on a rank.
        is_wanted: Whether rank 0 wants the save.
        is_outdated: Whether the tensors of a rank differ in structure from those of the previous save.
        has_unwritten: Whether a rank has frozen weights that no commit holds with their present values.
        token: A random number, which makes the save's prefix unique.
    """

    is_busy: bool
    is_wanted: bool
    is_outdated: bool
    has_unwritten: bool
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPart:
    """One rank's part of a save, staged for the upload.

    Attributes:
        receipt: The rank's receipt, without the sizes and checksums of its files.
        data: The bytes of its data file.
        frozen: The part that frozen weights have in the save.
        tree: As in `Parts`; rank 0 writes it to the manifest.
        extra: As `tree`.
        is_tried: Whether the save reads some of it back before it counts: no save of tensors of this structure has.
    """

    receipt: Receipt
    data: Staged | StagedPieces
    frozen: FrozenPart
    tree: codec.Json
    extra: codec.Json
    is_tried: bool = False

    @property
    def is_in_pieces(self) -> bool:
        """Whether the tensors have to stay as they are until the part is stored."""
        return isinstance(self.data, StagedPieces) or isinstance(self.frozen.staged, StagedPieces)

    def close(self) -> None:
        """Copy nothing more. The tensors may change as soon as this returns."""
        self.data.close()
        if self.frozen.staged is not None:
            self.frozen.staged.close()
