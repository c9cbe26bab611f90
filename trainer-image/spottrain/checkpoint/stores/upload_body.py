"""The body of an upload: memory that clients of object stores read as a file, without a copy."""

from __future__ import annotations

import os


class UploadBody:
    """The part of a binary file's interface that clients use to read. Its `read` returns views, not bytes.

    A copy of a part would hold the interpreter lock, so that the training would wait for it.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int | None = -1) -> memoryview:
        begin = self._position
        end = len(self._data) if size is None or size < 0 else min(begin + size, len(self._data))
        self._position = max(begin, end)
        return self._data[begin:end]

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._data)}[whence]
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        return self._position
