"""Keys and certificates of one cluster: a CA, the API server's two certificates, the key of service account tokens."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = datetime.timedelta(days=365)


@dataclass(frozen=True)
class Authority:
    """A certificate authority that lives as long as its cluster."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


def create_authority(folder: Path) -> Authority:
    """Write `ca.crt`; the key stays in memory, nobody signs anything after the start."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        _certificate("local-cluster-ca", (), issuer=_name("local-cluster-ca", ()), key=key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
    )
    authority = Authority(key, builder.sign(key, hashes.SHA256()))
    (folder / "ca.crt").write_bytes(authority.certificate.public_bytes(serialization.Encoding.PEM))
    return authority


def issue_server(authority: Authority, folder: Path, name: str, addresses: Sequence[str], dns: Sequence[str]) -> None:
    """Write `NAME.crt` and `NAME.key` for a server that is reached at these addresses and names."""
    names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
    names += [x509.DNSName(entry) for entry in dns]
    _issue(authority, folder, name, (), ExtendedKeyUsageOID.SERVER_AUTH, x509.SubjectAlternativeName(names))


def issue_client(authority: Authority, folder: Path, name: str, groups: Sequence[str]) -> None:
    """Write `NAME.crt` and `NAME.key` for a client whose user is NAME."""
    _issue(authority, folder, name, groups, ExtendedKeyUsageOID.CLIENT_AUTH, None)


def create_signing_key(folder: Path, name: str) -> None:
    """Write `NAME.key` and `NAME.pub`: one signs service account tokens, the other checks them."""
    key = ec.generate_private_key(ec.SECP256R1())
    _write_key(folder / f"{name}.key", key)
    (folder / f"{name}.pub").write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def _issue(
    authority: Authority,
    folder: Path,
    name: str,
    groups: Sequence[str],
    usage: x509.ObjectIdentifier,
    alternatives: x509.SubjectAlternativeName | None,
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        _certificate(name, groups, issuer=authority.certificate.subject, key=key)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    )
    if alternatives is not None:
        builder = builder.add_extension(alternatives, critical=False)
    certificate = builder.sign(authority.key, hashes.SHA256())
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_key(folder / f"{name}.key", key)


def _certificate(
    name: str, groups: Sequence[str], *, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    # One hour back: the clock of a freshly resumed machine may step.
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name, groups))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + _LIFETIME)
    )


def _name(common_name: str, groups: Sequence[str]) -> x509.Name:
    organizations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*organizations, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
