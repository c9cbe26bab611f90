"""The certificate authority of a release, and what it issues.

The next authority is made and trusted a day before it starts to sign, so that every agent trusts it by then. Time is
an argument: `certificate_keeper` stores what these functions return.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_LIFETIME = timedelta(days=365)
AUTHORITY_ROTATION = timedelta(days=240)
# From the moment that agents are given the next authority until it signs.
OVERLAP = timedelta(days=1)
SERVER_LIFETIME = timedelta(days=30)
SERVER_RENEWAL = timedelta(days=20)
# The clocks of nodes differ.
BACKDATE = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A certificate and its private key, in PEM."""

    certificate: str
    key: str

    def issued_at(self) -> datetime:
        """When it was made. Raises ValueError if the PEM is damaged."""
        return x509.load_pem_x509_certificate(self.certificate.encode()).not_valid_before_utc + BACKDATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Authorities:
    """The authority that signs, and the one that is going to."""

    current: KeyPair
    next: KeyPair | None = None

    @property
    def bundle(self) -> str:
        """What agents trust, in PEM."""
        return self.current.certificate + (self.next.certificate if self.next is not None else "")


def rotated(found: Authorities | None, now: datetime) -> Authorities:
    """The authorities from now on.

    `found` is None if there are none yet. If no operator ran for months, an authority that is about to expire is
    replaced at once.
    """
    if found is None or now - (found.next or found.current).issued_at() >= AUTHORITY_LIFETIME - OVERLAP:
        return Authorities(current=new_authority(now))
    if found.next is None:
        if now - found.current.issued_at() < AUTHORITY_ROTATION:
            return found
        return replace(found, next=new_authority(now))
    if now - found.next.issued_at() < OVERLAP:
        return found
    return Authorities(current=found.next)


def new_authority(now: datetime) -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    # The date tells two authorities apart: a client looks for an issuer by its name.
    subject = _named(f"spottrain control API {now.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}")
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = _builder(subject, subject, key.public_key(), now, AUTHORITY_LIFETIME)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    return _pair(builder.sign(key, hashes.SHA256()), key)


def issue(authority: KeyPair, hosts: Sequence[str], now: datetime) -> KeyPair:
    """A certificate for a server with these names and addresses.

    Raises:
        ValueError: The authority's PEM is damaged.
    """
    signer = x509.load_pem_x509_certificate(authority.certificate.encode())
    signer_key = serialization.load_pem_private_key(authority.key.encode(), password=None)
    if not isinstance(signer_key, ec.EllipticCurvePrivateKey):
        raise ValueError("the authority's key is not one of an elliptic curve")
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_named("spottrain-operator"), signer.subject, key.public_key(), now, SERVER_LIFETIME)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName([_general_name(each) for each in hosts]), False)
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer_key.public_key()), critical=False
    )
    return _pair(builder.sign(signer_key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, lifetime: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    encoding, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return KeyPair(
        certificate=certificate.public_bytes(encoding).decode(),
        key=key.private_bytes(encoding, kind, serialization.NoEncryption()).decode(),
    )
