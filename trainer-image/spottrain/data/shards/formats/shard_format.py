"""What the formats of shards have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, Protocol

Place = Any
Decode = Callable[[dict[str, Any]], Any]
Unpack = Callable[[BinaryIO, BinaryIO], None]
"""Reads a shard from the first file, and writes it to the second one. Raises InvalidShard."""


class InvalidShard(ValueError):
    """A shard that does not have its format. The message is a clause."""


def check_pyarrow(what: str) -> None:
    """Raises ValueError if pyarrow, which `what` need, can't be imported."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{what} need pyarrow, which can't be imported ({error}). Install spottrain with its extra 'arrow'; "
            "for a job, in its image"
        ) from error


@contextmanager
def read_as(what: str, *errors: type[Exception]) -> Iterator[None]:
    """Raise InvalidShard for errors of a library, and for its OSErrors. Those of the disk have a number, and stay."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (OSError, *errors)) or (isinstance(error, OSError) and error.errno):
            raise
        first_line = str(error).strip().partition("\n")[0]
        raise InvalidShard(f"it can't be read as {what}: {first_line}") from error


class ShardFormat(Protocol):
    """How samples lie in a shard."""

    @property
    def name(self) -> str:
        """What the index calls it, with all that decides how many samples a shard has."""
        ...

    def unpack(self, name: str) -> Unpack | None:
        """What gives the shard of this name the form in which samples are read; None if it has that form."""
        ...

    def places(self, file: BinaryIO) -> Sequence[Place]:
        """Where each sample of an unpacked shard is. Raises InvalidShard."""
        ...

    def sample(self, file: int, place: Place) -> Any:
        """Read one sample of an unpacked shard, which `file` is the descriptor of."""
        ...
