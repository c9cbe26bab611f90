"""The authority and the certificate of the control API.

They are made, rotated without a cut, and served without a restart.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from control_folder import control_folder
from spottrain_agent.control_client import ControlClient
from spottrain_api.contract.assignments import AgentReport, Assignment, AssignmentAction
from spottrain_api.contract.names import FILE_CONTROL_CA, FILE_CONTROL_URL, PATH_ASSIGNMENT, PATH_REPORT
from spottrain_operator.control_api.certificate_keeper import (
    SECRET_NAME,
    CertificateKeeper,
    CertificateMissingError,
    CertificateSource,
    decoded,
)
from spottrain_operator.control_api.certificates import (
    AUTHORITY_LIFETIME,
    AUTHORITY_ROTATION,
    OVERLAP,
    SERVER_LIFETIME,
    SERVER_RENEWAL,
    Authorities,
    issue,
    new_authority,
    rotated,
)
from spottrain_operator.control_api.observability import metrics_application
from spottrain_operator.kube.errors import ForbiddenError
from spottrain_operator.kube.resources import SECRETS
from world.cluster import MemoryCluster
from world.faults import Fault

NAMESPACE = "spottrain-system"
KEY = (NAMESPACE, SECRET_NAME)
SECOND, DAY = timedelta(seconds=1), timedelta(days=1)


def today() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def test_the_next_authority_is_trusted_for_a_day_before_it_signs() -> None:
    begin = today()
    first = rotated(None, begin)
    assert first.next is None
    assert rotated(first, begin + AUTHORITY_ROTATION - SECOND) == first
    due = begin + AUTHORITY_ROTATION
    both = rotated(first, due)
    assert both.current == first.current
    assert both.next is not None
    assert both.bundle == first.current.certificate + both.next.certificate
    assert rotated(both, due + OVERLAP - SECOND) == both
    after = rotated(both, due + OVERLAP)
    assert after == Authorities(current=both.next)
    assert rotated(after, due + OVERLAP) == after


def test_an_operator_that_was_away_for_months_serves_no_authority_that_has_expired() -> None:
    begin = today()
    first = rotated(None, begin)
    both = rotated(first, begin + AUTHORITY_ROTATION)
    for found in (first, both):
        late = begin + 2 * AUTHORITY_LIFETIME
        fresh = rotated(found, late)
        assert (fresh.current.issued_at(), fresh.next) == (late, None)
    assert rotated(both, begin + AUTHORITY_LIFETIME).current == both.next


def test_nothing_that_is_served_expires_before_it_is_renewed() -> None:
    assert AUTHORITY_ROTATION + OVERLAP + SERVER_LIFETIME < AUTHORITY_LIFETIME
    assert SERVER_RENEWAL + DAY < SERVER_LIFETIME


@dataclass
class Keeping:
    """Keepers of operators on one Secret."""

    cluster: MemoryCluster = field(default_factory=MemoryCluster)
    now: datetime = field(default_factory=today)

    def keeper(
        self, *, leads: bool = True, source: CertificateSource = CertificateSource.OPERATOR
    ) -> CertificateKeeper:
        return CertificateKeeper(
            self.cluster,
            namespace=NAMESPACE,
            source=source,
            hosts=["127.0.0.1", "spottrain-operator.spottrain-system.svc"],
            may_write=lambda: leads,
            now=lambda: self.now,
        )

    def put(self, **data: str) -> None:
        """Write the Secret as somebody else would."""
        encoded = {name: base64.b64encode(text.encode()).decode() for name, text in data.items()}
        self.cluster.secrets[KEY] = {
            "metadata": {"namespace": NAMESPACE, "name": SECRET_NAME, "resourceVersion": "1", "uid": "u"},
            "data": encoded,
        }


async def test_the_leader_fills_the_charts_empty_secret_and_the_next_operator_takes_it_up() -> None:
    keeping = Keeping()
    keeping.cluster.secrets[KEY] = {"metadata": {"namespace": NAMESPACE, "name": SECRET_NAME, "resourceVersion": "1"}}
    standby = keeping.keeper(leads=False)
    with pytest.raises(CertificateMissingError, match="the leader has not made an authority yet"):
        await standby.refresh()
    assert "data" not in keeping.cluster.secrets[KEY]
    leader = keeping.keeper()
    await leader.refresh()
    await standby.refresh()
    await (restarted := keeping.keeper()).refresh()
    assert leader.ca == standby.ca == restarted.ca == decoded(keeping.cluster.secrets[KEY])["ca.crt"]
    assert leader.ca.count("BEGIN CERTIFICATE") == 1


@pytest.mark.parametrize(
    "damage",
    [{}, {"current.key": "x"}, {"current.crt": "-----BEGIN CERTIFICATE-----"}, {"next.crt": "x", "next.key": "x"}],
    ids=["all", "the key", "the certificate", "the next"],
)
async def test_a_secret_that_lost_its_authority_gets_a_new_one(damage: dict[str, str]) -> None:
    keeping = Keeping()
    keeper = keeping.keeper()
    await keeper.refresh()
    before = keeper.ca
    keeping.put(**(decoded(keeping.cluster.secrets[KEY]) | damage if damage else {}))
    await keeper.refresh()
    assert keeper.ca != before
    assert keeper.ca.count("BEGIN CERTIFICATE") == 1


async def test_a_certificate_of_somebody_else_is_served_and_never_written() -> None:
    keeping = Keeping()
    keeper = keeping.keeper(source=CertificateSource.SECRET)
    with pytest.raises(CertificateMissingError, match=r"has no tls\.crt and tls\.key yet: see `kubectl --namespace"):
        await keeper.refresh()
    authority = new_authority(keeping.now)
    pair = issue(authority, ["127.0.0.1"], keeping.now)
    keeping.put(**{"tls.crt": pair.certificate, "tls.key": authority.key, "ca.crt": authority.certificate})
    with pytest.raises(CertificateMissingError, match="holds no usable certificate"):
        await keeper.refresh()
    keeping.put(**{"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": authority.certificate})
    written = dict(keeping.cluster.secrets)
    await keeper.refresh()
    assert keeper.ca == authority.certificate
    assert keeping.cluster.secrets == written


async def test_agents_are_given_the_certificates_of_a_bundle_without_its_comments() -> None:
    keeping = Keeping()
    keeper = keeping.keeper(source=CertificateSource.SECRET)
    authority, other = new_authority(keeping.now), new_authority(keeping.now)
    pair = issue(authority, ["127.0.0.1"], keeping.now)
    served = {"tls.crt": pair.certificate, "tls.key": pair.key}
    bundle = f"# Főtanúsítvány\r\n{authority.certificate}# 次\n{other.certificate}"
    keeping.put(**served, **{"ca.crt": bundle.replace("\n", "\r\n")})
    await keeper.refresh()
    found = keeper.ca
    assert found.replace("\r", "") == authority.certificate + other.certificate
    ssl.create_default_context(cadata=found)
    for damaged in ("ő", "# no certificate", authority.certificate.replace("M", "?")):
        keeping.put(**served, **{"ca.crt": damaged})
        with pytest.raises(CertificateMissingError, match=r"holds no usable ca\.crt"):
            await keeper.refresh()
        assert keeper.ca == found


async def test_a_missing_right_is_said_until_it_is_there(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "spottrain_operator")
    cluster = MemoryCluster()
    cluster.before.append(Fault(error=ForbiddenError("secrets is forbidden"), resource=SECRETS))
    keeper = Keeping(cluster=cluster).keeper()
    keeping = asyncio.create_task(keeper.run(lambda: None))
    async with asyncio.timeout(5):
        while not caplog.records:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
    keeping.cancel()
    assert not keeper.opened.is_set()
    assert caplog.messages == ["the control API's certificate stays as it is: secrets is forbidden"]


REPORT = AgentReport(pod="gpt-1", pod_uid="u", rendezvous_port=1, sent_at=datetime(2026, 1, 1, tzinfo=UTC))


@dataclass
class Served:
    """A control API with TLS on a port of its own, and the agent's folder."""

    keeper: CertificateKeeper
    folder: Path
    client: ControlClient
    url: str = ""

    def tell(self) -> None:
        """As the kubelet does, after the operator has annotated the pod."""
        control_folder(self.folder, self.url, self.keeper.ca)


async def accepted(_: web.Request) -> web.Response:
    return web.Response(status=204)


async def assignment(_: web.Request) -> web.Response:
    return web.Response(text=Assignment(action=AssignmentAction.WAIT).to_json())


@asynccontextmanager
async def serving(keeper: CertificateKeeper, *, tls: bool = True) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_post(PATH_REPORT, accepted)
    application.router.add_get(PATH_ASSIGNMENT, assignment)
    server = TestServer(application, scheme="https" if tls else "http")
    await server.start_server(ssl=keeper.context if tls else None)
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.port}"
    finally:
        await server.close()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    keeper = Keeping().keeper()
    await keeper.refresh()
    async with serving(keeper) as url, aiohttp.ClientSession() as session:
        client = ControlClient(session, tmp_path, None)
        found = Served(keeper=keeper, folder=tmp_path, client=client, url=url)
        found.tell()
        yield found


async def test_an_agent_verifies_the_operator(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    assert await served.client.send_report(REPORT)
    heard: asyncio.Queue[Assignment] = asyncio.Queue()
    async with asyncio.timeout(10):
        following = asyncio.create_task(served.client.follow_assignments(heard.put_nowait))
        assert (await heard.get()).action is AssignmentAction.WAIT
        following.cancel()
    (served.folder / FILE_CONTROL_CA).write_text(new_authority(today()).certificate)
    assert not await served.client.send_report(REPORT)
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
    (served.folder / FILE_CONTROL_CA).write_text("")
    assert not await served.client.send_report(REPORT), "the authorities of the image are others"
    (served.folder / FILE_CONTROL_CA).write_text(f"# Főtanúsítvány\n{served.keeper.ca}", encoding="utf-8")
    assert not await served.client.send_report(REPORT), "authorities are ASCII"
    served.tell()
    assert await served.client.send_report(REPORT)


async def test_an_agent_knows_no_address_but_that_of_its_files(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    (served.folder / FILE_CONTROL_URL).write_text("")
    assert not await served.client.send_report(REPORT)
    assert "The operator at an unknown address does not answer" in caplog.text
    assert "url is empty: the annotation of this pod is gone" in caplog.text
    (served.folder / FILE_CONTROL_URL).unlink()
    assert not await served.client.send_report(REPORT)
    served.tell()
    assert await served.client.send_report(REPORT)


async def test_a_running_agent_follows_the_operator_to_another_port_scheme_and_authority(served: Served) -> None:
    assert await served.client.send_report(REPORT)
    other = Keeping().keeper()
    await other.refresh()
    async with serving(other) as url:
        served.url, served.keeper = url, other
        served.tell()
        assert await served.client.send_report(REPORT)
    async with serving(other, tls=False) as url:
        served.url = url
        served.tell()
        assert await served.client.send_report(REPORT)


async def test_a_rotation_cuts_nobody_off() -> None:
    """The agent's file lags behind the operator's by most of the overlap."""
    keeping = Keeping()
    keeper = keeping.keeper()
    changes: list[str] = []
    await keeper.refresh()
    async with serving(keeper) as url:
        for step in (timedelta(0), AUTHORITY_ROTATION, OVERLAP - timedelta(minutes=1), timedelta(minutes=1), OVERLAP):
            lagging = keeper.ca
            keeping.now += step
            await keeper.refresh()
            if keeper.ca != lagging:
                changes.append(keeper.ca)
            trust = ssl.create_default_context(cadata=lagging)
            # The certificate is of a time to come; what matters is who signed it.
            trust.verify_flags |= 0x200000  # X509_V_FLAG_NO_CHECK_TIME
            trust.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
            async with aiohttp.ClientSession() as session, session.post(url + PATH_REPORT, ssl=trust) as answer:
                assert answer.status == 204
    assert [ca.count("BEGIN CERTIFICATE") for ca in changes] == [2, 1]


async def test_metrics_ask_for_a_token_if_they_are_given_one(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("scrape-me\n")
    keeper = Keeping().keeper()
    await keeper.refresh()
    server = TestServer(metrics_application(lambda: (b"metrics", "text/plain"), tmp_path / "token"), scheme="https")
    await server.start_server(ssl=keeper.context)
    trust = ssl.create_default_context(cadata=keeper.ca)
    url = f"https://127.0.0.1:{server.port}/metrics"
    async with aiohttp.ClientSession() as session:
        for header, status in (({}, 401), ({"Authorization": "Bearer scrape"}, 401), ({"Authorization": "é"}, 401)):
            async with session.get(url, headers=header, ssl=trust) as answer:
                assert answer.status == status
                assert "metricsTokenSecret" in await answer.text()
        async with session.get(url, headers={"Authorization": "Bearer scrape-me"}, ssl=trust) as answer:
            assert (answer.status, await answer.read()) == (200, b"metrics")
    await server.close()
