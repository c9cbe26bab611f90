"""The parts that one rank saves, and facts that all ranks have agreed on.

They agree before they copy the parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spottrain.checkpoint.format import codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts that one rank saves: tensors, and everything else as JSON."""

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
    """One rank's parts, and the facts that all ranks have agreed on."""

    parts: Parts
    own: codec.Tensors
    """Tensors that every save writes."""
    once: codec.Tensors
    """Frozen weights."""
    is_busy: bool
    """Whether the previous save is under way on a rank."""
    is_wanted: bool
    has_changed: bool
    """Whether the tensors of a rank differ in structure from those of the previous save."""
    has_unwritten: bool
    """Whether a rank has frozen weights that no commit holds with their present values."""
    unique: int
