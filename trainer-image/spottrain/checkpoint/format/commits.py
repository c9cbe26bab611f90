"""What HEAD says: which checkpoints exist, and who may write the next."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict

from spottrain.checkpoint.errors import CheckpointMismatch, CorruptCheckpoint
from spottrain.checkpoint.format.checksummed_json import dump_checksummed, verify_checksummed

# Of HEAD and of manifests. A reader refuses any other, because it would take what it doesn't know for damage.
FORMAT_VERSION = 1


def manifest_key(prefix: str) -> str:
    """The key of the manifest of the attempt at `prefix`."""
    return f"{prefix}manifest.json"


def _checked(time: str) -> str:
    datetime.fromisoformat(time)
    return time


# UTC, ISO 8601. For people: no decision depends on it.
Time = Annotated[str, AfterValidator(_checked)]


class Commit(BaseModel):
    """One committed checkpoint, as HEAD names it.

    Attributes:
        attempt: Prefix of the attempt that wrote all the objects of this checkpoint, with its trailing slash.
        committed_at: UTC, ISO 8601. For people: no decision depends on it.
        needs: Attempts of other commits to whose frozen weights this one refers, which stay as long as it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    generation: int
    step: int
    attempt: str
    manifest_sha256: str
    committed_at: Time
    needs: tuple[str, ...] = ()

    @property
    def manifest(self) -> str:
        """Key of the manifest."""
        return manifest_key(self.attempt)


class Head(BaseModel):
    """The kept commits, newest first, and the fence: the generation below which nobody may commit.

    Attributes:
        rebuilt: Whether HEAD was missing or damaged, and was rebuilt from the attempts (rebuild.py). Not stored.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = FORMAT_VERSION
    fence: int
    commits: tuple[Commit, ...] = ()
    rebuilt: bool = False

    @property
    def newest(self) -> Commit | None:
        return self.commits[0] if self.commits else None

    def held(self) -> set[str]:
        """The prefixes of the commits, and of the attempts with their frozen weights."""
        return {prefix for commit in self.commits for prefix in (commit.attempt, *commit.needs)}

    def serialise(self) -> bytes:
        """The bytes to store."""
        return dump_checksummed(self, indent=1, exclude={"rebuilt"})

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read stored bytes. Raises CheckpointMismatch for an unknown version of the format, or CorruptCheckpoint."""
        try:
            text = verify_checksummed(data)
            version = json.loads(text)["format_version"]
            if version != FORMAT_VERSION:
                raise CheckpointMismatch(
                    f"The checkpoints are of format version {version}; this spottrain reads {FORMAT_VERSION}. "
                    "Use the spottrain that wrote them, or create a new job with a different checkpoint.uri."
                )
            return cls.model_validate_json(text)
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpoint(
                f"HEAD of the checkpoint store is damaged ({error.__class__.__name__}), and the store holds no whole "
                "checkpoint to rebuild it from. Restore it from a version of the bucket, or create a new job with "
                "a different checkpoint.uri."
            ) from error
