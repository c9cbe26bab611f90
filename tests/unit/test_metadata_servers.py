"""The three clouds' metadata servers, as their clients see them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from spottrain_local.metadata.interruption import read_interruption
from spottrain_local.metadata.server import build_app

START = Callable[..., Awaitable[str]]
GOOGLE = {"Metadata-Flavor": "Google"}
AZURE = {"Metadata": "true"}
SCHEDULED_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"


@pytest.fixture
def interruption_file(tmp_path: Path) -> Path:
    return tmp_path / "interruption.json"


@pytest.fixture
async def start(interruption_file: Path) -> AsyncIterator[START]:
    """Starts a server of a provider; returns its base URL."""
    runners = []

    async def start_one(provider: Any, spot: bool = True) -> str:
        app = build_app(
            provider=provider,
            instance_id="i-0123456789abcdef0",
            name="node-a",
            instance_type="g5.xlarge",
            zone="eu-central-1a",
            spot=spot,
            interruption_file=interruption_file,
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start_one
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def interrupt(path: Path, kind: str = "preempt", *, seconds: float = 120, **changes: Any) -> datetime:
    """Write an interruption; returns its deadline."""
    now = datetime.now(UTC).replace(microsecond=0)
    deadline = now + timedelta(seconds=seconds)
    values = {"id": "x1", "kind": kind, "action": "terminate", "noticeAt": now.isoformat()}
    path.write_text(json.dumps(values | {"deadline": deadline.isoformat()} | changes))
    return deadline


async def get(http: aiohttp.ClientSession, url: str, **headers: str) -> tuple[int, str]:
    async with http.get(url, headers=headers) as response:
        return response.status, await response.text()


async def imds_token(http: aiohttp.ClientSession, base: str, ttl: str = "60") -> tuple[int, str]:
    header = {"X-aws-ec2-metadata-token-ttl-seconds": ttl}
    async with http.put(f"{base}/latest/api/token", headers=header) as response:
        return response.status, await response.text()


# -- EC2 -----------------------------------------------------------------------------------------------------


async def test_ec2_needs_a_token(start: START, http: aiohttp.ClientSession) -> None:
    base = await start("eks")
    url = f"{base}/latest/meta-data/instance-id"
    assert (await get(http, url))[0] == 401
    assert (await get(http, url, **{"X-aws-ec2-metadata-token": "wrong"}))[0] == 401
    for ttl in ("", "0", "21601", "x"):
        assert (await imds_token(http, base, ttl))[0] == 400
    _, token = await imds_token(http, base)
    assert await get(http, url, **{"X-aws-ec2-metadata-token": token}) == (200, "i-0123456789abcdef0")


async def test_an_ec2_token_expires(start: START, http: aiohttp.ClientSession) -> None:
    base = await start("eks")
    _, token = await imds_token(http, base, "1")
    url, header = f"{base}/latest/meta-data/instance-id", {"X-aws-ec2-metadata-token": token}
    began = time.monotonic()
    while (await get(http, url, **header))[0] != 401:
        assert time.monotonic() - began < 5, "the token still works"
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("instance-type", "g5.xlarge"),
        ("instance-life-cycle", "spot"),
        ("placement/availability-zone", "eu-central-1a"),
        ("placement/region", "eu-central-1"),
        ("placement", "availability-zone\nregion"),
    ],
)
async def test_ec2_values(start: START, http: aiohttp.ClientSession, path: str, expected: str) -> None:
    base = await start("eks")
    header = {"X-aws-ec2-metadata-token": (await imds_token(http, base))[1]}
    assert await get(http, f"{base}/latest/meta-data/{path}", **header) == (200, expected)


async def test_ec2_spot_notice_comes_and_is_cancelled(
    start: START, http: aiohttp.ClientSession, interruption_file: Path
) -> None:
    base = await start("eks")
    header = {"X-aws-ec2-metadata-token": (await imds_token(http, base))[1]}
    url = f"{base}/latest/meta-data/spot/instance-action"
    assert (await get(http, url, **header))[0] == 404
    deadline = interrupt(interruption_file).strftime("%Y-%m-%dT%H:%M:%SZ")
    _, text = await get(http, url, **header)
    assert json.loads(text) == {"action": "terminate", "time": deadline}
    assert await get(http, f"{base}/latest/meta-data/spot/termination-time", **header) == (200, deadline)
    interruption_file.unlink()
    assert (await get(http, url, **header))[0] == 404


async def test_ec2_rebalance(start: START, http: aiohttp.ClientSession, interruption_file: Path) -> None:
    base = await start("eks")
    header = {"X-aws-ec2-metadata-token": (await imds_token(http, base))[1]}
    interrupt(interruption_file, "rebalance")
    status, text = await get(http, f"{base}/latest/meta-data/events/recommendations/rebalance", **header)
    assert status == 200
    assert set(json.loads(text)) == {"noticeTime"}
    assert (await get(http, f"{base}/latest/meta-data/spot/instance-action", **header))[0] == 404


async def test_an_on_demand_instance_gets_no_spot_notice(
    start: START, http: aiohttp.ClientSession, interruption_file: Path
) -> None:
    base = await start("eks", spot=False)
    header = {"X-aws-ec2-metadata-token": (await imds_token(http, base))[1]}
    interrupt(interruption_file)
    assert (await get(http, f"{base}/latest/meta-data/spot/instance-action", **header))[0] == 404


async def test_a_notice_is_not_announced_before_its_time(
    start: START, http: aiohttp.ClientSession, interruption_file: Path
) -> None:
    base = await start("eks")
    header = {"X-aws-ec2-metadata-token": (await imds_token(http, base))[1]}
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    interrupt(interruption_file, noticeAt=later)
    assert (await get(http, f"{base}/latest/meta-data/spot/instance-action", **header))[0] == 404


async def test_ec2_maintenance(start: START, http: aiohttp.ClientSession, interruption_file: Path) -> None:
    base = await start("eks", spot=False)
    header = {"X-aws-ec2-metadata-token": (await imds_token(http, base))[1]}
    url = f"{base}/latest/meta-data/events/maintenance/scheduled"
    assert (await get(http, url, **header))[0] == 404
    deadline = interrupt(interruption_file, "maintenance")
    [event] = json.loads((await get(http, url, **header))[1])
    assert (event["Code"], event["State"], event["EventId"]) == ("instance-stop", "active", "instance-event-x1")
    assert parsedate_to_datetime(event["NotBefore"]) == deadline
    assert (await get(http, f"{base}/latest/meta-data/spot/instance-action", **header))[0] == 404


# -- GCE -----------------------------------------------------------------------------------------------------


async def test_gce_needs_its_header(start: START, http: aiohttp.ClientSession) -> None:
    base = await start("gke")
    assert (await get(http, f"{base}/computeMetadata/v1/instance/preempted"))[0] == 403
    assert (await get(http, f"{base}/computeMetadata/v1/instance/nope", **GOOGLE))[0] == 404
    assert await get(http, f"{base}/computeMetadata/v1/instance/scheduling/preemptible", **GOOGLE) == (200, "TRUE")


async def test_gce_waits_for_change(start: START, http: aiohttp.ClientSession, interruption_file: Path) -> None:
    url = f"{await start('gke')}/computeMetadata/v1/instance/preempted"
    assert await get(http, url, **GOOGLE) == (200, "FALSE")
    waiting = asyncio.create_task(get(http, f"{url}?wait_for_change=true", **GOOGLE))
    done, _ = await asyncio.wait({waiting}, timeout=0.3)
    assert not done
    interrupt(interruption_file)
    assert await asyncio.wait_for(waiting, 3) == (200, "TRUE")


async def test_gce_wait_times_out_with_the_old_value(start: START, http: aiohttp.ClientSession) -> None:
    url = f"{await start('gke')}/computeMetadata/v1/instance/preempted?wait_for_change=true&timeout_sec=1"
    assert await asyncio.wait_for(get(http, url, **GOOGLE), 5) == (200, "FALSE")


async def test_gce_last_etag_answers_at_once_when_the_value_moved_on(
    start: START, http: aiohttp.ClientSession, interruption_file: Path
) -> None:
    url = f"{await start('gke')}/computeMetadata/v1/instance/preempted"
    async with http.get(url, headers=GOOGLE) as response:
        etag = response.headers["ETag"]
    interrupt(interruption_file)
    query = f"?wait_for_change=true&last_etag={etag}"
    assert await asyncio.wait_for(get(http, url + query, **GOOGLE), 3) == (200, "TRUE")


async def test_gce_bad_timeout_is_refused(start: START, http: aiohttp.ClientSession) -> None:
    url = f"{await start('gke')}/computeMetadata/v1/instance/preempted?wait_for_change=true&timeout_sec=soon"
    assert (await get(http, url, **GOOGLE))[0] == 400


async def test_gce_maintenance(start: START, http: aiohttp.ClientSession, interruption_file: Path) -> None:
    url = f"{await start('gke')}/computeMetadata/v1/instance/maintenance-event"
    assert await get(http, url, **GOOGLE) == (200, "NONE")
    interrupt(interruption_file, "maintenance")
    assert await get(http, url, **GOOGLE) == (200, "TERMINATE_ON_HOST_MAINTENANCE")


# -- Azure ---------------------------------------------------------------------------------------------------


async def test_azure_needs_its_header_and_version(start: START, http: aiohttp.ClientSession) -> None:
    base = await start("aks")
    assert (await get(http, base + SCHEDULED_EVENTS))[0] == 400
    assert (await get(http, f"{base}/metadata/scheduledevents", **AZURE))[0] == 400


async def test_azure_preempt_event(start: START, http: aiohttp.ClientSession, interruption_file: Path) -> None:
    base = await start("aks")
    before = json.loads((await get(http, base + SCHEDULED_EVENTS, **AZURE))[1])
    assert before["Events"] == []
    deadline = interrupt(interruption_file, seconds=30)
    after = json.loads((await get(http, base + SCHEDULED_EVENTS, **AZURE))[1])
    event = after["Events"][0]
    assert after["DocumentIncarnation"] > before["DocumentIncarnation"]
    assert (event["EventType"], event["EventStatus"], event["Resources"]) == ("Preempt", "Scheduled", ["node-a"])
    assert parsedate_to_datetime(event["NotBefore"]) == deadline
    again = json.loads((await get(http, base + SCHEDULED_EVENTS, **AZURE))[1])
    assert again == after


async def test_azure_acknowledgement_starts_the_event(
    start: START, http: aiohttp.ClientSession, interruption_file: Path
) -> None:
    base = await start("aks")
    interrupt(interruption_file)
    document = json.loads((await get(http, base + SCHEDULED_EVENTS, **AZURE))[1])
    for event_id, status in (("nope", 400), (document["Events"][0]["EventId"], 200)):
        body = {"StartRequests": [{"EventId": event_id}]}
        async with http.post(base + SCHEDULED_EVENTS, json=body, headers=AZURE) as response:
            assert response.status == status
    started = json.loads((await get(http, base + SCHEDULED_EVENTS, **AZURE))[1])
    assert (started["Events"][0]["EventStatus"], started["Events"][0]["NotBefore"]) == ("Started", "")
    assert started["DocumentIncarnation"] > document["DocumentIncarnation"]


async def test_azure_names_the_vm_as_events_do(start: START, http: aiohttp.ClientSession) -> None:
    url = f"{await start('aks')}/metadata/instance/compute/name"
    assert await get(http, f"{url}?api-version=2021-02-01&format=text", **AZURE) == (200, "node-a")
    assert (await get(http, f"{url}?api-version=2021-02-01&format=text"))[0] == 400
    assert (await get(http, f"{url}?api-version=2020-07-01&format=text", **AZURE))[0] == 400
    assert (await get(http, f"{url}?api-version=2021-02-01", **AZURE))[0] == 400


async def test_azure_refuses_a_body_that_is_none(start: START, http: aiohttp.ClientSession) -> None:
    base = await start("aks")
    for body in (b"not json", b"{}", b'{"StartRequests": [1]}'):
        async with http.post(base + SCHEDULED_EVENTS, data=body, headers=AZURE) as response:
            assert response.status == 400


# -- the file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "{", "[]", '{"id": "x"}', '{"id": "x", "noticeAt": "soon", "deadline": 1}'])
def test_a_malformed_file_announces_nothing(interruption_file: Path, content: str) -> None:
    interruption_file.write_text(content)
    assert read_interruption(interruption_file, datetime.now(UTC)) is None
