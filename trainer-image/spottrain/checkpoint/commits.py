"""What HEAD says: which checkpoints exist, and who may write the next."""

from __future__ import annotations

import json
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from spottrain.checkpoint.errors import CheckpointMismatch, CorruptCheckpoint
from spottrain.checkpoint.seal import seal, unseal

FORMAT_VERSION = 1


def manifest_key(attempt: str) -> str:
    return f"{attempt}manifest.json"


class Commit(BaseModel):
    """One committed checkpoint, as HEAD names it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    generation: int
    step: int
    attempt: str
    """Prefix of all the objects of this checkpoint, with its trailing slash."""
    manifest_sha256: str
    committed_at: str
    """UTC, ISO 8601; for people: nothing is decided by it."""

    @property
    def manifest(self) -> str:
        """Key of the manifest."""
        return manifest_key(self.attempt)


class Head(BaseModel):
    """The kept commits, newest first, and the generation below which nobody may commit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = FORMAT_VERSION
    fence: int
    commits: tuple[Commit, ...] = ()
    rebuilt: bool = Field(default=False, exclude=True)
    """Whether it was made from what lies in the store, as HEAD itself was missing or damaged (rebuild.py)."""

    @property
    def newest(self) -> Commit | None:
        return self.commits[0] if self.commits else None

    def serialise(self) -> bytes:
        return seal(self, indent=1)

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CheckpointMismatch for another version of the format, and CorruptCheckpoint."""
        try:
            body = unseal(data)
            version = json.loads(body)["format_version"]
            if version != FORMAT_VERSION:
                raise CheckpointMismatch(
                    f"The checkpoints are of format version {version}; this spottrain reads version "
                    f"{FORMAT_VERSION}. Use the spottrain that wrote them, or another checkpoint.uri."
                )
            return cls.model_validate_json(body)
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpoint(
                f"HEAD of the checkpoint store is damaged ({error.__class__.__name__}), and no whole checkpoint lies "
                "there to make it anew from; restore it from a version of the bucket, or start afresh with another "
                "checkpoint.uri."
            ) from error
