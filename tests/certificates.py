"""Certificates for tests: an authority, and one certificate that it signs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def write_certificates(folder: Path) -> dict[str, str]:
    """`cluster.tls` of a new authority: ca_file, cert_file, key_file."""
    folder.mkdir(parents=True, exist_ok=True)
    authority, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    files = {name: folder / f"{name}.pem" for name in ("ca_file", "cert_file", "key_file")}
    files["ca_file"].write_bytes(_signed("authority", authority, authority))
    files["cert_file"].write_bytes(_signed("host", own, authority))
    files["key_file"].write_bytes(
        own.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return {name: str(file) for name, file in files.items()}


def _signed(name: str, key: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePrivateKey) -> bytes:
    subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (name, "authority"))
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - timedelta(hours=1),
        not_valid_after=now + timedelta(days=1),
    )
    is_authority = x509.BasicConstraints(ca=key is by, path_length=None)
    certificate = builder.add_extension(is_authority, critical=True).sign(by, hashes.SHA256())
    return certificate.public_bytes(serialization.Encoding.PEM)
