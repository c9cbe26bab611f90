"""The namespaces whose jobs an operator leads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """All namespaces, those with a name of a list, or those with labels.

    At most one of `names` and `labels` is given.
    """

    names: frozenset[str] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict)

    def contains(self, name: str, labels: Mapping[str, str]) -> bool:
        """Whether a namespace of this name with these labels is one of them."""
        if self.names:
            return name in self.names
        return self.labels.items() <= labels.items()

    def overlaps(self, other: Scope) -> bool:
        """Whether a namespace could be in both.

        Two selectors exclude each other only if they want different values of one label. What a list and a selector
        have in common changes with the labels of the namespaces, so they count as overlapping.
        """
        if self.names and other.names:
            return bool(self.names & other.names)
        return not any(other.labels.get(key, value) != value for key, value in self.labels.items())

    def to_json(self) -> str:
        return json.dumps({"names": sorted(self.names), "labels": dict(sorted(self.labels.items()))})

    @classmethod
    def from_json(cls, text: str | None) -> Scope:
        """Parse what `to_json` wrote. Anything else stands for all namespaces."""
        try:
            found = json.loads(text or "{}")
            return cls(names=frozenset(map(str, found.get("names", ()))), labels=dict(found.get("labels", {})))
        except (AttributeError, TypeError, ValueError, RecursionError):
            return cls()

    def __str__(self) -> str:
        if self.names:
            return f"the namespaces {', '.join(sorted(self.names))}"
        if self.labels:
            return f"the namespaces with {', '.join(f'{key}={value}' for key, value in sorted(self.labels.items()))}"
        return "all namespaces"
