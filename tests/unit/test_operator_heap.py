"""Memory that the operator gives back."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own, whose heap nobody else uses.
SCRIPT = """
import asyncio, psutil
from spottrain_operator.heap import keep_trimmed

def resident():
    return psutil.Process().memory_info().rss / 2**20

async def main():
    blocks = [bytes(4096) for _ in range(16 * 2**10)]
    kept = blocks[::100]
    full = resident()
    del blocks
    freed = resident()
    trimming = asyncio.create_task(keep_trimmed(0.01))
    async with asyncio.timeout(30):
        while resident() > full - 48:
            await asyncio.sleep(0.01)
    trimming.cancel()
    print(full - freed, len(kept))

asyncio.run(main())
"""


def test_what_lies_between_objects_in_use_is_given_back() -> None:
    ended = subprocess.run((sys.executable, "-c", SCRIPT), check=True, capture_output=True, text=True, timeout=60)
    before, kept = ended.stdout.split()
    assert float(before) < 16, "it would have been given back anyway"
    assert int(kept) == 164
