"""The base classes of all messages."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict
from pydantic.alias_generators import to_camel

from spottrain_runtime.wording import printable

# Version of what the parts say to each other. It rises with each release that has something new to say.
PROTOCOL_VERSION = 1

# Longer text in a report is refused.
MAX_TEXT_LENGTH = 4000
# Larger integers in a report are refused: Kubernetes has 64 bits for them.
MAX_INTEGER = 2**63 - 1


def _amount(value: Any) -> Any:
    return max(0, min(value, MAX_INTEGER)) if isinstance(value, int | float) else value


# Words of others, such as an exception's. The end is cut off, because a report that is refused for it would be lost.
# So would one be that can't be written, because of half a character. `kubectl get` shows them in a terminal.
Text = Annotated[
    str, AfterValidator(lambda text: printable(text[:MAX_TEXT_LENGTH].encode(errors="replace").decode()))
]
# An amount that follows from what a script asks for, such as its steps.
# One out of bounds is moved to the bound.
Amount = Annotated[int, BeforeValidator(_amount)]


class Message(BaseModel):
    """Base of all messages: immutable, and camelCase on the wire.

    Unknown fields are ignored, because a newer peer may send them.
    """

    model_config = ConfigDict(
        frozen=True, alias_generator=to_camel, populate_by_name=True, extra="ignore", allow_inf_nan=False
    )

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, exclude_none=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse a message of any version.

        Unknown fields are ignored in the settings inside it, too.
        """
        return cls.model_validate_json(text, extra="ignore")

    def write(self, path: Path) -> None:
        """Replace the file at `path` atomically: a reader never sees half a message.

        Raises OSError, and leaves the file as it was.
        """
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(self.to_json(), encoding="utf-8")
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def write_if_possible(self, path: Path) -> None:
        """Replace the file at `path`, or leave it as it was, as on a full disk."""
        with contextlib.suppress(OSError):
            self.write(path)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The message in the file at `path`, or None if there is no such file."""
        try:
            return cls.from_json(path.read_bytes())
        except FileNotFoundError:
            return None


class PeerMessage(Message):
    """Base of the messages between parts, whose releases may differ.

    Attributes:
        protocol_version: The sender's.
    """

    protocol_version: int = PROTOCOL_VERSION
