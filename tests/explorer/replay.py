"""Real code, one request at a time, with a state that can be copied and hashed.

A program is a function that asks its surroundings for everything that it needs. Its state is the log of the answers
so far. To go on, it runs again from its start: the log answers what it has asked before, and it stops at the first
question without an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Request = tuple[Any, ...]
"""What a program asks: a name, and hashable arguments."""


class Waits(BaseException):
    """The program waits for an answer. Code under test catches no BaseException."""

    def __init__(self, request: Request) -> None:
        self.request = request


class Raised(NamedTuple):
    """An answer that is an exception, in a form that can be compared."""

    kind: type[Exception]
    arguments: tuple[Any, ...]

    @classmethod
    def of(cls, error: Exception) -> Raised:
        return cls(type(error), tuple(_frozen(each) for each in error.args))

    def exception(self) -> Exception:
        return self.kind(*(_thawed(each) for each in self.arguments))


def _frozen(value: Any) -> Any:
    """The value, with tuples instead of lists.

    RankFailed has another rank's error as JSON.
    """
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value


def _thawed(value: Any) -> Any:
    return [_thawed(each) for each in value] if isinstance(value, tuple) else value


class Script:
    """Answers from the log; raises Waits at its end."""

    def __init__(self, log: tuple[Any, ...]) -> None:
        self._log = log
        self._position = 0

    def ask(self, *request: Any) -> Any:
        if self._position == len(self._log):
            raise Waits(request)
        answer = self._log[self._position]
        self._position += 1
        if isinstance(answer, Raised):
            raise answer.exception()
        return answer


class Position(NamedTuple):
    """Position of a program.

    It waits for an answer, or has ended with a result or an error.
    """

    request: Request | None
    result: Any = None
    error: Raised | None = None


def run(program: Callable[[Script], Any], log: tuple[Any, ...]) -> Position:
    """Run `program` against `log`."""
    try:
        return Position(None, result=program(Script(log)))
    except Waits as waits:
        return Position(waits.request)
    except Exception as error:
        return Position(None, error=Raised.of(error))
