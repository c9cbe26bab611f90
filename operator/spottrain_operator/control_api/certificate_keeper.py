"""Keeps the certificate of the control API.

The keeper reads the Secret, rotates the authority, and renews what is served, while the operator runs. Connections
that are open stay.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from spottrain_operator.control_api.certificates import SERVER_RENEWAL, Authorities, KeyPair, issue, rotated
from spottrain_operator.kube.cluster import Cluster, write
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.resources import SECRETS, Manifest

logger = logging.getLogger(__name__)

# Readable, and writable by the leader, by a Role for this name alone. The chart makes it, without data.
SECRET_NAME = "spottrain-control-tls"
LOOK_SECONDS = 60.0
RETRY_SECONDS = 1.0
CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
_CERTIFICATE = re.compile(r"-----BEGIN (?:X509 )?CERTIFICATE-----[\x00-\x7f]*?-----END (?:X509 )?CERTIFICATE-----")


class CertificateSource(StrEnum):
    """Who makes the certificate.

    Attributes:
        OPERATOR: The operator, with an authority of its own.
        SECRET: Somebody else, such as cert-manager, who keeps it in the Secret.
    """

    OPERATOR = "operator"
    SECRET = "secret"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A certificate to serve.

    Attributes:
        pair: The certificate and its key.
        ca: What agents have to trust for it, in PEM. Empty: what their images trust.
        signer: The authority that the operator signed it with.
        renew_at: When the operator issues the next one.
    """

    pair: KeyPair
    ca: str
    signer: KeyPair | None = None
    renew_at: datetime | None = None


class CertificateMissingError(Exception):
    """There is no certificate to serve yet. The text is a sentence."""


class CertificateKeeper:
    """Gives `context` the newest certificate, and `ca` what agents trust.

    Args:
        cluster: Where the Secret is.
        namespace: The Secret's.
        source: Who makes the certificate.
        hosts: Names and addresses of the control API.
        may_write: Whether this operator leads. Another one only reads.
        now: The time.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str,
        source: CertificateSource,
        hosts: Sequence[str],
        may_write: Callable[[], bool],
        now: Callable[[], datetime],
    ) -> None:
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # Agents resume no sessions, and the tickets for that take a third of a handshake's time.
        self.context.num_tickets = 0
        self.opened = asyncio.Event()
        self._cluster = cluster
        self._namespace = namespace
        self._source = source
        self._hosts = hosts
        self._may_write = may_write
        self._now = now
        self._served: Served | None = None

    @property
    def ca(self) -> str:
        """What agents have to trust, in PEM."""
        return self._served.ca if self._served is not None else ""

    async def run(self, on_change: Callable[[], None]) -> None:
        """Keep it until cancelled.

        `on_change` is called when agents have to trust something else.
        """
        while True:
            before = self.ca
            try:
                await self.refresh()
            except (ClusterError, CertificateMissingError) as error:
                logger.warning("the control API's certificate stays as it is: %s", error)
            except Exception:
                # It has to be renewed all the same, one day.
                logger.exception("the control API's certificate stays as it is")
            if self.ca != before:
                on_change()
            await asyncio.sleep(LOOK_SECONDS if self._served is not None else RETRY_SECONDS)

    async def refresh(self) -> None:
        """Read the Secret, and serve the newest certificate.

        If an authority is due, write it first.

        Raises:
            ClusterError: The Secret can't be read or written.
            CertificateMissingError: Nothing can be served yet.
        """
        secret = await self._cluster.get(SECRETS, SECRET_NAME, namespace=self._namespace)
        found = decoded(secret)
        served = self._given(found) if self._source is CertificateSource.SECRET else await self._own(secret, found)
        if served == self._served:
            return
        try:
            load(self.context, served.pair)
        except ssl.SSLError as error:
            raise CertificateMissingError(f"the Secret {SECRET_NAME} holds no usable certificate: {error}") from error
        self._served = served
        self.opened.set()
        logger.info("the control API has a new certificate")

    def _given(self, found: Mapping[str, str]) -> Served:
        if not (found.get(CERTIFICATE) and found.get(KEY)):
            raise CertificateMissingError(
                f"the Secret {SECRET_NAME} in {self._namespace} has no {CERTIFICATE} and {KEY} yet: see "
                f"`kubectl --namespace {self._namespace} describe certificate {SECRET_NAME}`"
            )
        try:
            ca = ca_of(found)
        except ssl.SSLError as error:
            raise CertificateMissingError(f"the Secret {SECRET_NAME} holds no usable {CA}: {error}") from error
        return Served(pair=KeyPair(certificate=found[CERTIFICATE], key=found[KEY]), ca=ca)

    async def _own(self, secret: Manifest | None, found: Mapping[str, str]) -> Served:
        stored = authorities_of(found)
        wanted = rotated(stored, self._now())
        if wanted != stored:
            if self._may_write():
                await write(self._cluster, SECRETS, self._secret(secret, wanted))
                logger.info("the control API has %s authority", "a new" if stored is None else "the next")
            elif stored is None:
                raise CertificateMissingError("the leader has not made an authority yet")
            else:
                wanted = stored
        return self._issued(wanted)

    def _issued(self, authorities: Authorities) -> Served:
        now, served = self._now(), self._served
        if served is not None and served.signer == authorities.current and served.renew_at and now < served.renew_at:
            return Served(pair=served.pair, ca=authorities.bundle, signer=served.signer, renew_at=served.renew_at)
        pair = issue(authorities.current, self._hosts, now)
        return Served(pair=pair, ca=authorities.bundle, signer=authorities.current, renew_at=now + SERVER_RENEWAL)

    def _secret(self, found: Manifest | None, authorities: Authorities) -> Manifest:
        metadata = found["metadata"] if found else {"namespace": self._namespace, "name": SECRET_NAME}
        secret = found or {"apiVersion": "v1", "kind": "Secret", "type": "Opaque"}
        data = {CA: authorities.bundle}
        for name, pair in (("current", authorities.current), ("next", authorities.next)):
            if pair is not None:
                data |= {f"{name}.crt": pair.certificate, f"{name}.key": pair.key}
        encoded = {name: base64.b64encode(text.encode()).decode() for name, text in data.items()}
        return secret | {"metadata": metadata, "data": encoded}


def decoded(secret: Manifest | None) -> dict[str, str]:
    """The texts in a Secret. What is no text is left out."""
    found = {}
    for name, value in ((secret or {}).get("data") or {}).items():
        with contextlib.suppress(binascii.Error, UnicodeDecodeError):
            found[name] = base64.b64decode(value).decode()
    return found


def ca_of(found: Mapping[str, str]) -> str:
    """What to trust by a Secret, in PEM, without the comments of its bundle.

    Empty if the Secret names no authorities.

    Raises:
        ssl.SSLError: A certificate in it is damaged, or it holds none.
    """
    if not found.get(CA):
        return ""
    # Python takes only ASCII, and comments may be in any language.
    certificates = "".join(f"{each}\n" for each in _CERTIFICATE.findall(found[CA]))
    if not certificates:
        raise ssl.SSLError(f"{CA} contains no certificate")
    ssl.create_default_context(cadata=certificates)
    return certificates


def authorities_of(found: Mapping[str, str]) -> Authorities | None:
    """The authorities in a Secret; None if there are none, or if they are damaged."""

    def pair(name: str) -> KeyPair | None:
        certificate, key = found.get(f"{name}.crt"), found.get(f"{name}.key")
        return KeyPair(certificate=certificate, key=key) if certificate and key else None

    current = pair("current")
    if current is None:
        return None
    authorities = Authorities(current=current, next=pair("next"))
    try:
        for each in filter(None, (authorities.current, authorities.next)):
            issue(each, ["check"], each.issued_at() + timedelta())
    except ValueError as error:
        logger.warning("the authority in the Secret %s is damaged, and is made anew: %s", SECRET_NAME, error)
        return None
    return authorities


def load(context: ssl.SSLContext, pair: KeyPair) -> None:
    """Serve new connections with this certificate.

    OpenSSL reads files alone. These are in memory, so that the key is never on a disk.

    Raises:
        ssl.SSLError: It is damaged, or the key is that of another certificate.
    """
    with _in_memory(pair.certificate) as certificate, _in_memory(pair.key) as key:
        context.load_cert_chain(certificate, key)


@contextlib.contextmanager
def _in_memory(text: str) -> Iterator[str]:
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
