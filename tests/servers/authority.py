"""Certificates for the tests, from an authority that the openssl command makes."""

import subprocess
from pathlib import Path
from typing import Final

# Ignore the host's openssl.cnf, which makes every certificate an authority's.
_CONFIG: Final = """[req]
distinguished_name = name
prompt = no
[name]
CN = {}
"""
_TIMEOUT_S: Final = 30.0


class Authority:
    """Signs certificates, each for one host, for two days.

    Args:
        directory: Directory of the files; created if missing.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        extensions = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign")
        self.file, self._key = self._make("ca", "tests", extensions)

    def certificate(self, *names: str) -> tuple[str, str]:
        """Return certificate and key of a host or a client with these names (``DNS:ctl1``)."""
        extensions = (
            "basicConstraints=critical,CA:FALSE",
            "extendedKeyUsage=serverAuth,clientAuth",
            f"subjectAltName={','.join(names)}",
        )
        signer = ("-CA", self.file, "-CAkey", self._key)
        return self._make(names[0].replace(":", "-"), "ctl1", extensions, signer)

    def _make(
        self, stem: str, name: str, extensions: tuple[str, ...], signer: tuple[str, ...] = ()
    ) -> tuple[str, str]:
        certificate, key, config = (
            str(self._directory / f"{stem}.{suffix}") for suffix in ("crt", "key", "cnf")
        )
        Path(config).write_text(_CONFIG.format(name))
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-config", config, "-days", "2", *signer),
                *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
                *("-keyout", key, "-out", certificate),
                *(word for extension in extensions for word in ("-addext", extension)),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        return certificate, key
