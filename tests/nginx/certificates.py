"""Authorities and certificates for tests, as files. Made on the spot: no key lies in the repository."""

from __future__ import annotations

from pathlib import Path

import trustme


class Authority:
    """One CA and the files that it issued."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(exist_ok=True)
        self._ca = trustme.CA(organization_name=name)
        self._folder = folder
        self.file = folder / f"{name}.ca.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def issue(self, stem: str, host: str = "127.0.0.1") -> tuple[Path, Path]:
        """Write a certificate for a host and its key; under the same stem they replace the ones before."""
        issued = self._ca.issue_cert(host)
        certificate, key = self._folder / f"{stem}.pem", self._folder / f"{stem}.key"
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        for path, data in ((certificate, chain), (key, issued.private_key_pem.bytes())):
            part = path.with_suffix(".part")
            part.write_bytes(data)
            part.replace(path)
        return certificate, key
