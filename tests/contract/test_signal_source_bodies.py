"""What clouds' metadata servers may answer, lies included.

The tests compare each body with the notices that follow from it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from signal_clouds import DEADLINE, Provider, listening, local_cloud, serve, source_of, until_trouble, within
from spottrain_api.contract.nodes import GKE_SPOT, LABEL_NOTICE_AHEAD, LABEL_SHUTDOWN_GRACE
from spottrain_api.contract.notices import NoticeKind
from spottrain_watcher import azure, ec2, gce
from spottrain_watcher.signal_source import SignalSource

FIRST_PATHS = {"eks": ec2.PATH_INSTANCE_ACTION, "gke": gce.PATH_PREEMPTED, "aks": azure.PATH_EVENTS}
# What a calm cloud answers; a body of None is a 404.
CALM: dict[str, str | None] = {
    ec2.PATH_TOKEN: "token",
    ec2.PATH_INSTANCE_ACTION: None,
    ec2.PATH_REBALANCE: None,
    ec2.PATH_MAINTENANCE: None,
    gce.PATH_PREEMPTED: "FALSE",
    gce.PATH_MAINTENANCE: "NONE",
    gce.PATH_KUBELET_CONFIG: None,
    azure.PATH_NAME: "vm_0",
    azure.PATH_EVENTS: '{"DocumentIncarnation": 1, "Events": []}',
}
LOADED_AT = datetime.now(UTC)
FAR = (DEADLINE - LOADED_AT).total_seconds()


@asynccontextmanager
async def saying(
    provider: Provider,
    changes: dict[str, str | None],
    headers: dict[str, str] | None = None,
    posted: list[str] | None = None,
    **options: Any,
) -> AsyncIterator[SignalSource]:
    """A source whose server gives the same answers for ever.

    `posted` receives the bodies of POST requests. `options` are the source's.
    """
    bodies = CALM | changes

    async def answer(request: web.Request) -> web.Response:
        body = bodies[request.path]
        if request.method == "POST" and posted is not None:
            posted.append(await request.text())
        flavor = {"Metadata-Flavor": "Google", "ETag": "0"} | (headers or {})
        return web.Response(status=404) if body is None else web.Response(text=body, headers=flavor)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    url, runner = await serve(application)
    async with aiohttp.ClientSession() as session:
        yield source_of(provider, session, url, **options)
    await runner.cleanup()


def interruption(action: Any = "terminate", time: Any = "2030-01-01T12:00:00Z") -> str:
    return json.dumps({"action": action, "time": time})


def event(**changes: Any) -> dict[str, Any]:
    known = {
        "EventId": "602D9444-D2CD-49C7-8624-8643E7171297",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["vm_0"],
        "EventStatus": "Scheduled",
        "NotBefore": format_datetime(DEADLINE, usegmt=True),
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }
    return {name: value for name, value in (known | changes).items() if value is not ...}


def events(*found: Any) -> str:
    return json.dumps({"DocumentIncarnation": 2, "Events": found})


def soon(minutes: float) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(minutes=minutes), usegmt=True)


PREEMPT, MAINTENANCE = NoticeKind.PREEMPT, NoticeKind.MAINTENANCE
# Each with the kinds that are announced, and the seconds until the earliest deadline.
TRUE: list[tuple[str, Provider, str, list[NoticeKind], float]] = [
    ("ec2 terminates", "eks", interruption(), [PREEMPT], FAR),
    ("ec2 stops", "eks", interruption("stop"), [PREEMPT], FAR),
    ("ec2 hibernates at once", "eks", interruption("hibernate"), [PREEMPT], 0),
    ("ec2's time is of 1970", "eks", interruption(time="1970-01-01T00:00:00Z"), [PREEMPT], 15),
    ("ec2's time is in 8000 years", "eks", interruption(time="9999-12-31T23:59:59Z"), [PREEMPT], 15),
    ("gce preempts", "gke", "TRUE\n", [PREEMPT], FAR),
    ("azure preempts", "aks", events(event()), [PREEMPT], FAR),
    ("azure preempts two VMs", "aks", events(event(Resources=["vm_1", "vm_0"])), [PREEMPT], FAR),
    ("azure deletes the VM", "aks", events(event(EventType="Terminate")), [PREEMPT], FAR),
    ("azure reboots soon", "aks", events(event(EventType="Reboot", NotBefore=soon(10))), [MAINTENANCE], 600),
    ("azure moves it soon", "aks", events(event(EventType="Redeploy", NotBefore=soon(10))), [MAINTENANCE], 600),
    ("azure freezes it soon", "aks", events(event(EventType="Freeze", NotBefore=soon(10))), [MAINTENANCE], 600),
    ("azure has started", "aks", events(event(EventStatus="Started", NotBefore="")), [PREEMPT], 0),
    ("azure says no time", "aks", events(event(NotBefore=...)), [PREEMPT], 30),
    ("azure's time is none", "aks", events(event(NotBefore="soon")), [PREEMPT], 30),
    ("azure's time is of 1970", "aks", events(event(NotBefore="Thu, 01 Jan 1970 00:00:00 GMT")), [PREEMPT], 30),
    ("azure says the same twice", "aks", events(event(), event()), [PREEMPT], FAR),
    (
        "azure's fields are odd",
        "aks",
        events(event(NotBefore=5, DurationInSeconds=None, EventStatus=[])),
        [PREEMPT],
        30,
    ),
    ("azure has two events", "aks", events(event(), event(EventId="2", NotBefore=soon(1))), [PREEMPT] * 2, 60),
    (
        "azure's event of another VM has an odd duration",
        "aks",
        events(event(), event(EventId="2", Resources=["vm_1"], DurationInSeconds=None)),
        [PREEMPT],
        FAR,
    ),
    ("azure's event lacks what is new", "aks", events(event(DurationInSeconds=..., EventStatus=...)), [PREEMPT], FAR),
]
SILENT: list[tuple[str, Provider, str | None]] = [
    ("ec2 has nothing", "eks", None),
    ("gce has nothing", "gke", "FALSE"),
    ("azure has nothing", "aks", events()),
    ("azure means another VM", "aks", events(event(Resources=["vm_1"]))),
    ("azure means a VM of a longer name", "aks", events(event(Resources=["vm_01"]))),
    ("azure means nobody", "aks", events(event(Resources=[]))),
    ("azure has an event of a new type", "aks", events(event(EventType="Applaud"))),
    ("azure's event interrupts nothing", "aks", events(event(EventType="Freeze", DurationInSeconds=0))),
    ("azure reboots next week", "aks", events(event(EventType="Reboot", NotBefore=soon(10_000)))),
]
MALFORMED: list[tuple[str, Provider, str]] = [
    ("ec2's action is new", "eks", interruption("applaud")),
    ("ec2's action is a number", "eks", interruption(7)),
    ("ec2's time has no zone", "eks", interruption(time="2030-01-01T12:00:00")),
    ("ec2's time is a list", "eks", interruption(time=[])),
    ("ec2 says a list", "eks", "[]"),
    ("gce says something new", "gke", "MAYBE"),
    ("gce says nothing", "gke", ""),
    ("azure says a list", "aks", "[]"),
    ("azure's events are text", "aks", '{"Events": "none"}'),
    ("azure's event is text", "aks", events("Preempt")),
    ("azure's resources are text", "aks", events(event(Resources="vm_0"))),
    ("azure's event has no id", "aks", events(event(EventId=""))),
]


def ids(table: list[Any]) -> list[str]:
    return [row[0] for row in table]


@pytest.mark.parametrize(("provider", "body", "kinds", "seconds"), [row[1:] for row in TRUE], ids=ids(TRUE))
async def test_a_signal_is_announced(provider: Provider, body: str, kinds: list[NoticeKind], seconds: float) -> None:
    async with saying(provider, {FIRST_PATHS[provider]: body}) as source:
        notices = await within(30, source.watch())
    assert [notice.kind for notice in notices] == kinds
    deadline, now = min(notice.deadline for notice in notices), datetime.now(UTC)
    # A body that states a time was made when this file was loaded.
    assert LOADED_AT + timedelta(seconds=seconds - 30) < deadline < now + timedelta(seconds=seconds + 1)
    assert source.trouble is None


@pytest.mark.parametrize(("provider", "body"), [row[1:] for row in SILENT], ids=ids(SILENT))
async def test_what_is_no_signal_is_not_announced(provider: Provider, body: str | None) -> None:
    async with saying(provider, {FIRST_PATHS[provider]: body}) as source:
        assert await within(30, source.watch()) == ()
    assert source.trouble is None


@pytest.mark.parametrize(("provider", "body"), [row[1:] for row in MALFORMED], ids=ids(MALFORMED))
async def test_a_malformed_signal_is_trouble(provider: Provider, body: str) -> None:
    async with saying(provider, {FIRST_PATHS[provider]: body}) as source, listening(source):
        await until_trouble(source, True)


@pytest.mark.parametrize(
    ("body", "kinds"), [("TERMINATE_ON_HOST_MAINTENANCE", [MAINTENANCE]), ("MIGRATE_ON_HOST_MAINTENANCE", [])]
)
async def test_gce_only_a_vm_that_cannot_migrate_goes(body: str, kinds: list[NoticeKind]) -> None:
    now = datetime.now(UTC)
    async with saying("gke", {gce.PATH_MAINTENANCE: body}, now=lambda: now) as source:
        answers = source.watch()
        assert await within(30, answers) == ()
        if kinds:
            (notice,) = await within(30, answers)
            assert (notice.kind, notice.deadline) == (MAINTENANCE, now + timedelta(seconds=60))
        else:
            with pytest.raises(TimeoutError):
                await within(1, answers)


async def test_gce_a_vm_without_maintenance_events_is_no_trouble() -> None:
    async with saying("gke", {gce.PATH_MAINTENANCE: None}) as source:
        answers = source.watch()
        assert await within(30, answers) == ()
        with pytest.raises(TimeoutError):
            await within(1, answers)
        assert source.trouble is None


@pytest.mark.parametrize(
    ("labels", "seconds"),
    [
        ({}, 30),
        ({GKE_SPOT: "true"}, 15),
        ({GKE_SPOT: "true", LABEL_SHUTDOWN_GRACE: "105"}, 105),
        ({LABEL_NOTICE_AHEAD: "120"}, 150),
        ({LABEL_NOTICE_AHEAD: "120", LABEL_SHUTDOWN_GRACE: "20"}, 140),
        ({LABEL_NOTICE_AHEAD: "soon"}, 30),
    ],
    ids=str,
)
async def test_gce_a_notice_ends_when_the_shutdown_leaves_pods_nothing(labels: dict[str, str], seconds: int) -> None:
    now = datetime.now(UTC)
    body: dict[str, str | None] = {gce.PATH_PREEMPTED: "TRUE"}
    async with saying("gke", body, now=lambda: now, labels=lambda: labels) as source:
        (notice,) = await within(30, source.watch())
    assert notice.deadline == now + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("config", "seconds"),
    [
        ("shutdownGracePeriod: 2m0s\nshutdownGracePeriodCriticalPods: 15s\n", 105),
        ('{"shutdownGracePeriod": "30s", "shutdownGracePeriodCriticalPods": "15s"}', 15),
        ("shutdownGracePeriod: 1m\n", 60),
        ("shutdownGracePeriod: 0s\nshutdownGracePeriodCriticalPods: 0s\n", None),
        ("kind: KubeletConfiguration\n", None),
        ("shutdownGracePeriod: 10s\nshutdownGracePeriodCriticalPods: 15s\n", None),
        ("shutdownGracePeriod: 9999999h\n", None),
    ],
)
def test_gke_the_kubelets_configuration_says_what_it_leaves_pods(config: str, seconds: int | None) -> None:
    assert gce.grace_of_config(config.encode()) == seconds


@pytest.mark.parametrize("config", ["shutdownGracePeriod: soon", "shutdownGracePeriod: [1]", "- 1", "{", "\x00", ""])
def test_gke_a_configuration_that_is_none_is_malformed(config: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        gce.grace_of_config(config.encode())


@pytest.mark.parametrize(("config", "known"), [("shutdownGracePeriod: 1m45s", [105]), (None, [])], ids=["gke", "gce"])
async def test_gke_the_kubelets_grace_is_read_from_the_metadata(config: str | None, known: list[int]) -> None:
    told: list[int] = []
    bodies = {gce.PATH_KUBELET_CONFIG: config}
    async with saying("gke", bodies, on_shutdown_grace=told.append) as source, asyncio.timeout(30):
        answers = source.watch()
        assert await anext(answers) == ()
        later = asyncio.ensure_future(anext(answers))
        while told != known or source.trouble is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        later.cancel()


async def test_gce_another_server_at_its_address_is_trouble() -> None:
    async with saying("gke", {gce.PATH_PREEMPTED: "TRUE"}, {"Metadata-Flavor": "Else"}) as source, listening(source):
        await until_trouble(source, True)
        assert "Metadata-Flavor" in (source.trouble or "")


@pytest.mark.parametrize("tag", ["", "tag\udcff", "t" * 2000])
async def test_gce_without_a_usable_tag_is_polled(tag: str) -> None:
    changes: dict[str, str | None] = {gce.PATH_PREEMPTED: "FALSE"}
    async with saying("gke", changes, {"ETag": tag}) as source:
        answers = source.watch()
        assert await within(30, answers) == ()


@pytest.mark.parametrize("time", [5, None, [], "soon", "Mon, 19 Sep 99999 18:29:47 GMT"], ids=repr)
async def test_ec2_maintenance_at_a_time_that_is_none_is_trouble(time: Any) -> None:
    body = json.dumps([{"EventId": "e", "Code": "system-reboot", "State": "active", "NotBefore": time}])
    async with saying("eks", {ec2.PATH_MAINTENANCE: body}) as source:
        answers = source.watch()
        assert await within(30, answers) == ()
        again = asyncio.ensure_future(anext(answers))
        await until_trouble(source, True)
        assert ec2.PATH_MAINTENANCE in (source.trouble or "")
        assert not again.done(), "the watcher goes on"
        again.cancel()


@pytest.mark.parametrize("token", ["", "two\nlines", "t" * 5000, "é"])
async def test_ec2_a_token_that_is_none_is_trouble(token: str) -> None:
    async with saying("eks", {ec2.PATH_TOKEN: token}) as source, listening(source):
        await until_trouble(source, True)
        assert "no token" in (source.trouble or "")


async def test_azure_without_the_name_of_the_vm_nothing_is_announced() -> None:
    bodies: dict[str, str | None] = {azure.PATH_NAME: None, azure.PATH_EVENTS: events(event())}
    async with saying("aks", bodies) as source, listening(source) as first:
        await until_trouble(source, True)
        assert "the name of the VM is unknown: status 404" in (source.trouble or "")
        assert not first.done()


async def test_azure_an_event_that_starts_early_ends_the_notice_early(tmp_path: Path) -> None:
    """Another VM may have acknowledged it."""
    async with local_cloud("aks", tmp_path) as cloud:
        cloud.announce("preempt")
        answers = cloud.source.watch()
        (notice,) = await within(30, answers)
        cloud.announce("preempt", datetime.now(UTC))
        (other,) = await within(30, answers)
        assert other.deadline < notice.deadline


async def test_azure_an_event_is_acknowledged_once_and_only_when_the_node_is_vacated(tmp_path: Path) -> None:
    vacated = asyncio.Event()

    async def is_vacated() -> bool:
        return vacated.is_set()

    async with local_cloud("aks", tmp_path, is_vacated=is_vacated) as cloud:
        cloud.announce("preempt")
        answers = cloud.source.watch()
        (notice,) = await within(30, answers)
        assert (notice.deadline, cloud.acknowledgements) == (DEADLINE, [])
        vacated.set()
        (started,) = await within(30, answers)
        assert started.id == notice.id
        assert started.deadline <= datetime.now(UTC)
        await cloud.until_requests(3)
        assert cloud.acknowledgements == [{"StartRequests": [{"EventId": notice.id.removeprefix("azure-")}]}]


@pytest.mark.parametrize("is_told", [False, True], ids=["by default", "for two VMs"])
async def test_azure_an_event_that_others_may_need_is_not_acknowledged(is_told: bool) -> None:
    async def is_vacated() -> bool:
        return True

    body: dict[str, str | None] = {
        azure.PATH_EVENTS: events(event(Resources=["vm_0", "vm_1"] if is_told else ["vm_0"]))
    }
    posted: list[str] = []
    async with saying("aks", body, posted=posted, is_vacated=is_vacated if is_told else None) as source:
        await within(30, source.watch())
    assert posted == []
