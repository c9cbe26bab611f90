"""The body of an upload: memory that the clients of object stores read as a file, without a copy of it."""

from __future__ import annotations

import os


class UploadBody:
    """What clients use of a binary file that is open for reading; its `read` gives views, not bytes.

    A copy of a part would be made while the interpreter is locked, so that the training would wait for it.
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
