"""A disk without space, as seen by those who write files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

NO_SPACE = f"[Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}"


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no file get any content, and no new one be touched.

    Opening a file makes it, empty.
    """

    def write_text(path: Path, *_: object, **__: object) -> int:
        path.open("w").close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def touch(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_text", write_text)
    monkeypatch.setattr(Path, "touch", touch)
