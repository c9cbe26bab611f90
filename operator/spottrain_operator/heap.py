"""Memory that the process has freed, and holds all the same.

glibc keeps freed memory that lies between objects in use. After many agents came at once, that is a tenth of the
operator's memory or more.

https://man7.org/linux/man-pages/man3/malloc_trim.3.html
"""

from __future__ import annotations

import asyncio
import ctypes

TRIM_SECONDS = 60.0


async def keep_trimmed(pause_seconds: float = TRIM_SECONDS) -> None:
    """Give freed memory back to the system every `pause_seconds`, until cancelled.

    It takes some milliseconds each time. Without glibc, there is nothing to do.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(pause_seconds)
        trim(0)
