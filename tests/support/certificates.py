"""An authority and certificates for tests, made with the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from kvrelay.core.config import SecuritySettings


class Authority:
    """Signs what a test needs. Everything lies in `directory`."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory = directory
        self.ca = directory / f"{name}.pem"
        self._ca_key = directory / f"{name}.key"
        _openssl(
            "req", "-x509", *_NEW_KEY, "-keyout", self._ca_key, "-out", self.ca, "-days", 2, "-subj", f"/CN={name}",
        )  # fmt: skip

    def issue(self, name: str, dns: str = "kvrelay") -> SecuritySettings:
        """Files for one process: `<name>.pem` and `<name>.key`. Issuing again under a name is a rotation."""
        request = self._directory / f"{name}.csr"
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        fresh, fresh_key = certificate.with_suffix(".new"), key.with_suffix(".new-key")
        _openssl(
            "req", *_NEW_KEY, "-keyout", fresh_key, "-out", request, "-subj", f"/CN={name}",
            "-addext", f"subjectAltName=DNS:{dns}",
        )  # fmt: skip
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._ca_key, "-CAcreateserial", "-days", 2,
            "-copy_extensions", "copy", "-out", fresh,
        )  # fmt: skip
        fresh.replace(certificate)
        fresh_key.replace(key)
        return SecuritySettings(ca=str(self.ca), certificate=str(certificate), key=str(key), name=dns)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def put_in_place(fresh: SecuritySettings, of: SecuritySettings) -> None:
    """The contents of the three files `fresh` into those that are in use."""
    for new, old in ((fresh.ca, of.ca), (fresh.certificate, of.certificate), (fresh.key, of.key)):
        Path(old).write_bytes(Path(new).read_bytes())


def have_openssl() -> bool:
    return shutil.which("openssl") is not None


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)
