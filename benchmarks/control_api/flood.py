"""Sends bogus tokens to a control API at a steady rate, until SIGTERM.

It then prints what was answered, as JSON. Half of the tokens are well-formed: for the audience and a pod that exists,
each with another signature. A quarter is for another audience, and a quarter is no token.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import signal
import ssl
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from spottrain_api.contract.names import PATH_ASSIGNMENT, TOKEN_AUDIENCE

NUM_CONNECTIONS = 50


@dataclass(slots=True)
class Flood:
    """Connections that send bogus tokens in turn.

    Each request waits for its answer, as an agent's requests do.
    """

    host: str
    port: int
    trust: ssl.SSLContext
    pod_uid: str
    per_second: float
    answers: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    began_at: float = field(default_factory=time.monotonic)

    def _encoded(self, content: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")

    def _token(self, number: int) -> str:
        if number % 4 == 3:
            return f"bogus-{number}"
        audience = TOKEN_AUDIENCE if number % 4 < 2 else "another"
        pod = {"pod": {"name": "gpt-1", "uid": self.pod_uid}}
        claims = {"aud": [audience], "exp": time.time() + 3600, "kubernetes.io": pod}
        return ".".join((self._encoded({"alg": "RS256"}), self._encoded(claims), self._encoded(number)))

    async def send(self, first: int) -> None:
        """Send every `NUM_CONNECTIONS`-th token over one connection."""
        reader, writer = await asyncio.open_connection(
            self.host, self.port, ssl=self.trust, server_hostname=self.host
        )
        number = first
        while True:
            await asyncio.sleep(self.began_at + number / self.per_second - time.monotonic())
            request = f"GET {PATH_ASSIGNMENT} HTTP/1.1\r\nHost: {self.host}\r\n"
            asked_at = time.monotonic()
            writer.write(f"{request}Authorization: Bearer {self._token(number)}\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(line for line in head.splitlines() if line.lower().startswith("content-length:"))
            await reader.readexactly(int(length.partition(":")[2]))
            self.seconds.append(time.monotonic() - asked_at)
            self.answers[head.split()[1]] += 1
            number += NUM_CONNECTIONS

    async def run(self, until: asyncio.Event) -> None:
        sending = [asyncio.create_task(self.send(number)) for number in range(NUM_CONNECTIONS)]
        ended = asyncio.create_task(until.wait())
        done, _ = await asyncio.wait({ended, *sending}, return_when=asyncio.FIRST_COMPLETED)
        for task in (ended, *sending):
            task.cancel()
        for task in done - {ended}:
            task.result()

    def summary(self) -> dict[str, object]:
        elapsed, ordered = time.monotonic() - self.began_at, sorted(self.seconds)
        return {
            "per_second": len(ordered) / elapsed,
            "answers": dict(self.answers),
            "answer_p50": ordered[len(ordered) // 2],
            "answer_p99": ordered[-1 - len(ordered) // 100],
        }


async def run(url: str, authority: str, pod_uid: str, per_second: float) -> None:
    address = urlsplit(url)
    trust = ssl.create_default_context(cadata=authority)
    until = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, until.set)
    flood = Flood(
        host=address.hostname or "", port=address.port or 443, trust=trust, pod_uid=pod_uid, per_second=per_second
    )
    with suppress(asyncio.CancelledError):
        await flood.run(until)
    print(json.dumps(flood.summary()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("authority", help="PEM")
    parser.add_argument("pod_uid")
    parser.add_argument("per_second", type=float)
    args = parser.parse_args()
    asyncio.run(run(args.url, args.authority, args.pod_uid, args.per_second))


if __name__ == "__main__":
    main()
