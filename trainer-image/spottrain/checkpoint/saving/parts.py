"""What one rank has to save, and what the ranks agree on before they copy it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spottrain.checkpoint.format import codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What one rank has to save: tensors, and the rest as JSON."""

    tensors: codec.Tensors
    tree: codec.Json
    extra: codec.Json
    rank_state: codec.Json

    @classmethod
    def of(cls, state: dict[str, Any], extra: dict[str, Any] | None, rank_state: dict[str, Any] | None) -> Parts:
        tensors, tree = codec.split(state)
        return cls(tensors=tensors, tree=tree, extra=codec.encode(extra or {}), rank_state=codec.encode(rank_state))


@dataclass(frozen=True, slots=True)
class AgreedParts:
    """One rank's parts, and the answers that all ranks have to the same questions."""

    parts: Parts
    own: codec.Tensors
    """Tensors that every save writes."""
    once: codec.Tensors
    """Frozen weights."""
    is_busy: bool
    """Whether the save before is under way on a rank."""
    is_wanted: bool
    has_changed: bool
    """Whether the tensors of a rank differ in structure from those of the save before."""
    has_unwritten: bool
    """Whether a rank has frozen weights that no commit holds as they are."""
    unique: int
