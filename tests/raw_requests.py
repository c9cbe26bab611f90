"""Requests as no client of ours sends them: halves, and some with too much."""

from __future__ import annotations

import asyncio


async def answer(port: int, sent: bytes) -> bytes:
    """What a port of 127.0.0.1, once it listens, sends until it closes."""
    while True:
        try:
            reading, writing = await asyncio.open_connection("127.0.0.1", port)
            break
        except ConnectionRefusedError:
            await asyncio.sleep(0.01)
    writing.write(sent)
    received = await reading.read()
    writing.close()
    return received
