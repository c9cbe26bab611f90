"""An iterable of the script's, with its state if it has one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class HasState(Protocol):
    """What can be read on from where it was."""

    def state_dict(self) -> dict[str, Any] | None:
        """None: it can't be read on from here. A resume reads on from the state before."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class OpenStream(Iterator[Any]):
    """The items of an iterable. Before the first, a state may be loaded into `stateful`.

    Attributes:
        stateful: The iterable or its iterator, whichever has a state. None: neither has.
    """

    def __init__(self, made: Iterable[Any]) -> None:
        self._made = made
        self._items: Iterator[Any] | None = None
        self.stateful: HasState | None = made if isinstance(made, HasState) else None
        if self.stateful is None:
            self._items = iter(made)
            self.stateful = self._items if isinstance(self._items, HasState) else None

    def __next__(self) -> Any:
        if self._items is None:  # only now: a state is loaded before
            self._items = iter(self._made)
        return next(self._items)
