"""Certificates made on the spot, with the `openssl` command."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class Signed:
    """A certificate and its key, files in PEM."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        """Skips the test where there is no `openssl`."""
        if shutil.which("openssl") is None:
            pytest.skip("certificates are made with the openssl command")
        folder.mkdir()
        self._folder = folder
        self.own = self._signed("authority", ("-subj", "/CN=test authority"))
        self.certificate = self.own.certificate

    def sign(self, name: str, host: str = "127.0.0.1") -> Signed:
        """A certificate for a host: an address or a name."""
        kind = "IP" if host.replace(".", "").isdigit() or ":" in host else "DNS"
        return self._signed(
            name,
            ("-subj", f"/CN={name}", "-addext", f"subjectAltName={kind}:{host}"),
            ("-CA", str(self.own.certificate), "-CAkey", str(self.own.key)),
        )

    def _signed(self, name: str, *options: tuple[str, ...]) -> Signed:
        made = Signed(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        command = ["openssl", "req", "-x509", "-nodes", "-days", "2", "-newkey", "ec", "-pkeyopt"]
        command += ["ec_paramgen_curve:P-256", "-keyout", str(made.key), "-out", str(made.certificate)]
        for more in options:
            command += more
        subprocess.run(command, check=True, capture_output=True)
        return made
