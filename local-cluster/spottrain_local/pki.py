"""Keys and certificates of a local cluster.

The authorities and the service accounts' key live as long as the cluster. Each start issues new certificates, so that
addresses may change and nothing expires. All keys are P-256, which take a millisecond to generate.
"""

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from spottrain_local.layout import write_atomically

AUTHORITY_DAYS = 3650
LEAF_DAYS = 365
# The clock of a laptop that was asleep may jump back.
BACKDATE = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """The files of a certificate and its private key, in PEM."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """A certificate authority that lives in a folder."""

    certificate_file: Path
    _certificate: x509.Certificate
    _key: ec.EllipticCurvePrivateKey

    def issue(
        self,
        target: Path,
        common_name: str,
        *,
        organizations: Sequence[str] = (),
        addresses: Sequence[str] = (),
        names: Sequence[str] = (),
    ) -> KeyPair:
        """Write `target`.crt and `target`.key, for servers and clients.

        Kubernetes reads the common name as the user and the organizations as its groups. `addresses` (IP) and
        `names` (DNS) are those of a server.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in organizations]
        subject = x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _builder(subject, self._certificate.subject, key.public_key(), LEAF_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        # Python asks for both identifiers from 3.13 on.
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(signer, critical=False)
        alternatives: list[x509.GeneralName] = [x509.DNSName(name) for name in names]
        alternatives += [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        pair = KeyPair(certificate=target.with_name(f"{target.name}.crt"), key=target.with_name(f"{target.name}.key"))
        write_atomically(pair.key, _private_pem(key))
        write_atomically(pair.certificate, _certificate_pem(builder.sign(self._key, hashes.SHA256())))
        return pair


def open_authority(folder: Path, name: str) -> Authority:
    """Open the authority `name` in a folder, and create it if there is none."""
    certificate_file, key_file = folder / f"{name}.crt", folder / f"{name}.key"
    if not certificate_file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"spottrain local {name}")])
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
        builder = _builder(subject, subject, key.public_key(), AUTHORITY_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(usage, critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        # The key comes first: if the certificate is on the disk, the authority is complete.
        write_atomically(key_file, _private_pem(key))
        write_atomically(certificate_file, _certificate_pem(builder.sign(key, hashes.SHA256())))
    private_key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
    assert isinstance(private_key, ec.EllipticCurvePrivateKey)
    return Authority(
        certificate_file=certificate_file,
        _certificate=x509.load_pem_x509_certificate(certificate_file.read_bytes()),
        _key=private_key,
    )


def open_service_account_key(folder: Path) -> Path:
    """Return the key that signs service accounts' tokens; create a missing one."""
    path = folder / "service-accounts.key"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _private_pem(ec.generate_private_key(ec.SECP256R1())))
    return path


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _private_pem(key: ec.EllipticCurvePrivateKey) -> str:
    # Kubernetes reads service accounts' keys in this format, too.
    encoding, kind = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    return key.private_bytes(encoding, kind, serialization.NoEncryption()).decode()


def _certificate_pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
