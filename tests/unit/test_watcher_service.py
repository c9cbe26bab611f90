"""The watcher's notice API, and what it shows on the Node.

The source is in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from benchmarks.ports import free_ports

from memory_signals import MemorySource
from raw_requests import answer
from signal_clouds import NODE, Ec2Cloud, KubernetesCloud, node_object, serve
from spottrain_api.contract.notices import Notice, NoticeKind, NoticeList
from spottrain_runtime import http_server
from spottrain_watcher import __main__ as program
from spottrain_watcher.ec2 import ENV_ENDPOINT
from spottrain_watcher.kubernetes_api import KubernetesApi
from spottrain_watcher.watcher import Watcher

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NOTICE = Notice(id="1", node="n", source="ec2", deadline=NOW + timedelta(minutes=2), observed_at=NOW)


@dataclass
class MemoryMarker:
    shown: list[Notice | None] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def show(self, notice: Notice | None) -> None:
        self.shown.append(notice)
        self.renew()

    def renew(self) -> None:
        self.changed.set()


class SilentSource(MemorySource):
    """Reports nothing before `has_answered` is set."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.has_answered = asyncio.Event()

    async def watch(self) -> AsyncIterator[tuple[Notice, ...]]:
        await self.has_answered.wait()
        async for notices in super().watch():
            yield notices


@dataclass
class Service:
    client: TestClient[web.Request, web.Application]
    sources: tuple[MemorySource, MemorySource]
    marker: MemoryMarker

    async def ask(self, after: str = "") -> NoticeList:
        response = await self.client.get("/v1/notice", params={"after": after})
        return NoticeList.from_json(await response.read())


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    sources = (MemorySource("ec2"), MemorySource("kubernetes"))
    marker = MemoryMarker()
    watcher = Watcher(sources, marker, "proof")
    task = asyncio.create_task(watcher.run())
    async with TestClient(TestServer(watcher.application())) as client:
        yield Service(client, sources, marker)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_long_poll_ends_when_a_notice_comes(service: Service) -> None:
    before = await service.ask()
    waiting = asyncio.create_task(service.ask(after=before.revision))
    await service.sources[0].announce(NOTICE)
    async with asyncio.timeout(2):
        assert (await waiting).notices == (NOTICE,)


async def test_whoever_asks_late_is_answered_at_once(service: Service) -> None:
    await service.sources[0].announce(NOTICE)
    await service.marker.changed.wait()
    async with asyncio.timeout(2):
        assert (await service.ask(after="what it knew before a restart")).notices == (NOTICE,)


async def test_the_proof_is_given_with_notices_alone(service: Service) -> None:
    assert (await service.ask()).proof is None
    await service.sources[0].announce(NOTICE)
    assert (await service.ask()).proof == "proof"


async def test_the_node_is_marked_and_unmarked(service: Service) -> None:
    await service.sources[0].announce(NOTICE)
    async with asyncio.timeout(2):
        while NOTICE not in service.marker.shown:
            service.marker.changed.clear()
            await service.marker.changed.wait()
        await service.sources[0].announce()
        while service.marker.shown[-1] is not None:
            service.marker.changed.clear()
            await service.marker.changed.wait()


async def test_nobody_is_answered_between_the_first_answer_of_a_source_and_its_report() -> None:
    kubernetes, ec2, marker = MemorySource("kubernetes"), SilentSource("ec2"), MemoryMarker()
    watcher = Watcher([kubernetes, ec2], marker, "proof")
    await kubernetes.announce(NOTICE)
    await ec2.announce(other := NOTICE.model_copy(update={"id": "2"}))
    running = asyncio.create_task(watcher.run())
    async with TestClient(TestServer(watcher.application())) as client, asyncio.timeout(10):
        asking = asyncio.create_task(Service(client, (kubernetes, ec2), marker).ask())
        await marker.changed.wait()
        assert (await client.get("/healthz")).status == 200
        ec2.has_answered.set()
        assert set((await asking).notices) == {NOTICE, other}
    running.cancel()


async def test_a_hint_leaves_an_earlier_watchers_mark_until_all_sources_have_reported() -> None:
    """It may be of a notice of EC2, from before the watcher started again."""
    kubernetes, ec2, marker = MemorySource("kubernetes"), SilentSource("ec2"), MemoryMarker()
    ec2.trouble, ec2.starting = "EC2's metadata service has not answered yet.", True
    watcher = Watcher([kubernetes, ec2], marker, "proof")
    hint = NOTICE.model_copy(update={"id": "hint", "kind": NoticeKind.REBALANCE})
    await kubernetes.announce(hint)
    running = asyncio.create_task(watcher.run())
    async with TestClient(TestServer(watcher.application())) as client, asyncio.timeout(10):
        service = Service(client, (kubernetes, ec2), marker)
        while (await service.ask()).notices != (hint,):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await marker.changed.wait()
        assert marker.shown == [], "it only renews the mark, as the Node may have been registered anew"
        marker.changed.clear()
        ec2.has_answered.set()
        await marker.changed.wait()
        assert marker.shown == [hint]
    running.cancel()


async def test_a_watcher_that_hears_no_cloud_takes_back_what_it_has_shown() -> None:
    kubernetes, ec2, marker = MemorySource("kubernetes"), SilentSource("ec2"), MemoryMarker()
    ec2.trouble = "EC2's metadata service is away."
    await kubernetes.announce(NOTICE)
    running = asyncio.create_task(Watcher([kubernetes, ec2], marker, "proof").run())
    async with asyncio.timeout(10):
        await marker.changed.wait()
        assert marker.shown == [NOTICE]
        marker.changed.clear()
        await kubernetes.announce()
        await marker.changed.wait()
        assert marker.shown == [NOTICE, None]
    running.cancel()


async def test_it_says_that_it_is_healthy(service: Service) -> None:
    assert (await service.client.get("/healthz")).status == 200


async def test_a_source_that_hears_nothing_ends_the_long_poll_and_the_readiness(service: Service) -> None:
    before = await service.ask()
    assert (before.trouble, before.hears_cloud) == (None, True)
    assert (await service.client.get("/readyz")).status == 200
    waiting = asyncio.create_task(service.ask(after=before.revision))
    service.sources[0].trouble = "EC2's metadata service is away:\x1b[31m\nConnection refused."
    async with asyncio.timeout(5):
        blind = await waiting
    assert blind.trouble == "EC2's metadata service is away: [31m Connection refused."
    refused = await service.client.get("/readyz")
    assert (refused.status, await refused.text()) == (503, blind.trouble)
    assert (await service.client.get("/healthz")).status == 200
    service.sources[0].trouble = None
    async with asyncio.timeout(5):
        assert (await service.ask(after=blind.revision)).trouble is None
    assert (await service.client.get("/readyz")).status == 200


async def test_a_source_whose_first_answer_takes_its_time_is_no_blindness(service: Service) -> None:
    ec2, kubernetes = service.sources
    before = await service.ask()
    ec2.trouble, ec2.starting = "EC2's metadata service has not answered yet.", True
    async with asyncio.timeout(5):
        starts = await service.ask(after=before.revision)
    assert (starts.starting, starts.trouble) == (True, ec2.trouble)
    assert (await service.client.get("/readyz")).status == 503, "nobody hears the cloud yet"
    kubernetes.trouble = "The API server is away."
    async with asyncio.timeout(5):
        blind = await service.ask(after=starts.revision)
    assert (blind.starting, blind.trouble) == (False, f"{ec2.trouble} {kubernetes.trouble}")
    kubernetes.trouble, ec2.starting = None, False
    async with asyncio.timeout(5):
        late = await service.ask(after=blind.revision)
    assert (late.starting, late.trouble) == (False, ec2.trouble)


async def test_a_watcher_that_is_blind_still_passes_on_what_it_hears(service: Service) -> None:
    service.sources[0].trouble = "EC2's metadata service is away."
    await service.sources[1].announce(NOTICE)
    await service.marker.changed.wait()
    assert (await service.ask()).notices == (NOTICE,)


async def test_its_metrics(service: Service) -> None:
    async def samples() -> dict[str, float]:
        text = await (await service.client.get("/metrics")).text()
        lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith("spottrain_watcher")]
        return {name: float(value) for name, _, value in lines}

    before = await service.ask()
    at_first = await samples()
    # Prometheus' increase() leaves out the first value of a series.
    assert at_first['spottrain_watcher_notices_total{kind="preempt",source="ec2"}'] == 0.0
    assert at_first['spottrain_watcher_polls_total{result="unchanged"}'] == 0.0
    service.sources[1].trouble = "The API server is away."
    await service.sources[0].announce(NOTICE)
    await service.ask(after=before.revision)
    await service.sources[0].announce(NOTICE, NOTICE.model_copy(update={"id": "x" * 10_000, "source": "\n"}))
    async with asyncio.timeout(5):
        while len((await service.ask()).notices) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    found = await samples()
    assert found['spottrain_watcher_notices_total{kind="preempt",source="ec2"}'] == 2.0
    assert found['spottrain_watcher_source_up{source="ec2"}'] == 1.0
    assert found['spottrain_watcher_source_up{source="kubernetes"}'] == 0.0
    assert found["spottrain_watcher_hears_cloud"] == 1.0
    assert found['spottrain_watcher_polls_total{result="changed"}'] >= 2.0
    assert found.keys() == at_first.keys(), "nothing that is announced adds a series"


async def test_a_node_of_no_known_cloud_is_said_and_counted_but_no_trouble(caplog: pytest.LogCaptureFixture) -> None:
    watcher = Watcher([MemorySource("kubernetes")], MemoryMarker(), "proof")
    task = asyncio.create_task(watcher.run())
    async with TestClient(TestServer(watcher.application())) as client:
        assert "spottrain_watcher_hears_cloud 0.0" in await (await client.get("/metrics")).text()
        assert (await client.get("/readyz")).status == 200
        answer = NoticeList.from_json(await (await client.get("/v1/notice")).read())
        assert (answer.trouble, answer.hears_cloud) == (None, False)
    task.cancel()
    assert [record.levelname for record in caplog.records if "Only the signals of Kubernetes" in record.message]


async def test_a_cloud_that_the_node_shows_late_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cloud's controller may give the node its providerID after the start."""
    kubernetes, ec2 = KubernetesCloud(), Ec2Cloud()
    (url, runner), (ec2_url, ec2_runner) = await serve(kubernetes.application()), await serve(ec2.application())
    (tmp_path / "token").write_text("token")

    async def uninitialized(*_: object) -> dict[str, Any]:
        return node_object()

    monkeypatch.setattr(program, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(program, "_read_node", uninitialized)
    monkeypatch.setattr(
        KubernetesApi, "in_cluster", lambda session, _: KubernetesApi(session, url, tmp_path / "token", None)
    )
    (port,) = free_ports(1)
    environ = {"SPOTTRAIN_NODE_NAME": NODE, "SPOTTRAIN_HOST_IP": "127.0.0.1", "SPOTTRAIN_WATCHER_PORT": str(port)}

    async with aiohttp.ClientSession() as session:
        watching = asyncio.create_task(program._watch(session, environ | {ENV_ENDPOINT: ec2_url}))

        async def until(holds: Callable[[NoticeList], bool]) -> NoticeList:
            while True:
                with contextlib.suppress(aiohttp.ClientConnectorError):
                    answer = await session.get(f"http://127.0.0.1:{port}/v1/notice")
                    if holds(found := NoticeList.from_json(await answer.read())):
                        return found
                await asyncio.sleep(0.01)

        try:
            async with asyncio.timeout(20):
                assert not (await until(lambda found: found.trouble is None)).hears_cloud
                kubernetes.node = node_object(providerID="aws:///eu-central-1a/i-0")
                await kubernetes.change()
                await until(lambda found: found.hears_cloud)
                await ec2.preempt()
                (notice,) = (await until(lambda found: bool(found.notices))).notices
                assert notice.source == "ec2"
                metrics = await (await session.get(f"http://127.0.0.1:{port}/metrics")).text()
                assert "spottrain_watcher_hears_cloud 1.0" in metrics
                assert 'spottrain_watcher_source_up{source="ec2"} 1.0' in metrics
        finally:
            watching.cancel()
            await asyncio.wait({watching})
    await runner.cleanup()
    await ec2_runner.cleanup()


async def test_its_port_holds_and_logs_little_for_who_sends_half_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def of_no_cloud(*_: object) -> dict[str, dict[str, str]]:
        return {"metadata": {"name": "n"}}

    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.1)
    monkeypatch.setattr(program, "_read_node", of_no_cloud)
    away = "http://127.0.0.1:1"
    monkeypatch.setattr(
        KubernetesApi, "in_cluster", lambda session, _: KubernetesApi(session, away, tmp_path / "token", None)
    )
    (port,) = free_ports(1)
    environ = {"SPOTTRAIN_NODE_NAME": "n", "SPOTTRAIN_HOST_IP": "127.0.0.1", "SPOTTRAIN_WATCHER_PORT": str(port)}

    async with aiohttp.ClientSession() as session:
        watching = asyncio.create_task(program._watch(session, environ))
        try:
            async with asyncio.timeout(20):
                poll = b"GET /v1/notice HTTP/1.1\r\nHost: a\r\n"
                assert await answer(port, poll) == b""
                assert (await answer(port, poll + b"A: " + b"b" * 3000)).startswith(b"HTTP/1.0 400")
                assert (await answer(port, poll + b"A: b\r\n" * 40)).startswith(b"HTTP/1.0 400")
                assert "Error handling request" not in caplog.text
        finally:
            watching.cancel()
            await asyncio.wait({watching})


def test_a_port_that_is_taken_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def of_no_cloud(*_: object) -> dict[str, Any]:
        return node_object()

    untouched = SimpleNamespace(configure=lambda _: None, remember=lambda **_: None)
    monkeypatch.setattr(program, "logs", untouched)  # the log is that of all tests
    monkeypatch.setattr(program, "_read_node", of_no_cloud)
    away = "http://127.0.0.1:1"
    monkeypatch.setattr(
        KubernetesApi, "in_cluster", lambda session, _: KubernetesApi(session, away, tmp_path / "token", None)
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        named = {"SPOTTRAIN_NODE_NAME": NODE, "SPOTTRAIN_HOST_IP": "127.0.0.1", "SPOTTRAIN_WATCHER_PORT": str(port)}
        for name, value in named.items():
            monkeypatch.setenv(name, value)
        assert program.main() == 2
    assert capsys.readouterr().err == (
        f"spottrain-watcher: can't listen at port {port} of 127.0.0.1: Address already in use. "
        "Stop what uses the port, or choose another one with the chart's value watcher.port.\n"
    )


def test_an_unknown_provider_is_refused_before_anything_else() -> None:
    named = {"SPOTTRAIN_NODE_NAME": "n", "SPOTTRAIN_HOST_IP": "127.0.0.1", "SPOTTRAIN_PROVIDER": "gcp"}
    command = [sys.executable, "-m", "spottrain_watcher"]
    done = subprocess.run(
        command, env={**os.environ, **named}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("spottrain-watcher: SPOTTRAIN_PROVIDER: 'gcp' is not a provider.")
    assert done.stderr.count("\n") == 1
