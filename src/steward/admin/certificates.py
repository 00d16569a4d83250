"""Certificates for nodes that are to be known by them and not by MUNGE: made by openssl.

An authority of its own, which signs Steward's certificate and one for each
node, in one directory. What is there already is left as it is, so that nodes
can be added later.
"""

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from steward.core.errors import StewardError, UsageError
from steward.slurm.nodelists import NodeListError, expand

_TIMEOUT_S: Final = 60.0
_NAME: Final = re.compile(r"[A-Za-z0-9*:][A-Za-z0-9.:_-]{0,252}")
_ADDRESS: Final = re.compile(r"[0-9.]+|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*")
# Nothing of the host's own openssl.cnf, which makes every certificate an authority's.
_CONFIG: Final = "[req]\ndistinguished_name = name\nprompt = no\n[name]\nCN = {}\n"
_MOST_COMMON_NAME: Final = 64


class CertificateError(StewardError):
    """A certificate cannot be made."""


class Authority:
    """Signs certificates for one site's nodes.

    Args:
        directory: Where all of it is kept; made, 0700, if need be.
        days: How long what is made now is valid.

    Raises:
        CertificateError: The directory or the authority cannot be made.
    """

    def __init__(self, directory: str, days: int) -> None:
        self._directory = Path(directory)
        self._days = days
        try:
            # Steward's user, who has a key of its own here, has to get at it.
            self._directory.mkdir(mode=0o711, exist_ok=True)
            (self._directory / "nodes").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise CertificateError(f"{directory} cannot be made: {error.strerror}") from error
        self.file = str(self._directory / "ca.crt")
        extensions = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign")
        self._make(self._directory / "ca", "Steward's nodes", extensions, signed=False)

    def server(self, names: Sequence[str]) -> bool:
        """Steward's own, for the names and addresses that agents know it by; whether it is new.

        Raises:
            UsageError: A name is none.
            CertificateError: openssl fails.
        """
        for name in names:
            if _NAME.fullmatch(name) is None:
                raise UsageError(f"{name!r} is neither a host's name nor an address")
        kinds = [f"{'IP' if _ADDRESS.fullmatch(name) else 'DNS'}:{name}" for name in names]
        return self._leaf(self._directory / "server", names[0], kinds, "serverAuth")

    def nodes(self, nodelist: str, cluster: str = "") -> Iterator[tuple[str, bool]]:
        """One for each node of a list: its name, and whether its certificate is new.

        Args:
            nodelist: As Slurm writes it: ``n[1-3],gpu7``.
            cluster: The cluster's name, where one Steward serves several.

        Raises:
            UsageError: It is no list of nodes.
            CertificateError: openssl fails.
        """
        try:
            names = expand(nodelist)
        except NodeListError as error:
            raise UsageError(str(error)) from error
        for name in names:
            if _NAME.fullmatch(name) is None:
                raise UsageError(f"{name!r} is no node's name")
            # Within a cluster the node's name tells it; among several only both together do.
            goes_by = [f"DNS:{name}.{cluster}"] if cluster else [f"DNS:{name}"]
            yield name, self._leaf(self._directory / "nodes" / name, name, goes_by, "clientAuth")

    def _leaf(self, stem: Path, name: str, goes_by: Iterable[str], use: str) -> bool:
        extensions = (
            "basicConstraints=critical,CA:FALSE",
            "keyUsage=critical,digitalSignature",
            f"extendedKeyUsage={use}",
            f"subjectAltName={','.join(goes_by)}",
        )
        return self._make(stem, name, extensions, signed=True)

    def _make(self, stem: Path, name: str, extensions: Sequence[str], *, signed: bool) -> bool:
        certificate, key = Path(f"{stem}.crt"), Path(f"{stem}.key")
        if certificate.exists() and key.exists():
            return False
        new_certificate, new_key = Path(f"{stem}.crt.new"), Path(f"{stem}.key.new")
        authority = str(self._directory / "ca")
        signer = ("-CA", f"{authority}.crt", "-CAkey", f"{authority}.key") if signed else ()
        words = [
            *("openssl", "req", "-x509", "-config", "/dev/stdin", "-days", str(self._days)),
            *(*signer, "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(new_key), "-out", str(new_certificate)),
            *(word for extension in extensions for word in ("-addext", extension)),
        ]
        _run(words, _CONFIG.format(name[:_MOST_COMMON_NAME]))
        try:
            new_key.chmod(0o600)
            new_certificate.chmod(0o644)
            new_key.replace(key)
            new_certificate.replace(certificate)
        except OSError as error:
            raise CertificateError(f"{stem}: {error.strerror}", str(stem)) from error
        return True


def _run(words: Sequence[str], text: str) -> None:
    try:
        done = subprocess.run(
            words,
            input=text.encode(),
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            umask=0o077,
            env={"PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"), "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CertificateError(f"openssl cannot be run: {error}") from error
    if done.returncode:
        said = " ".join(done.stderr.decode("utf-8", "backslashreplace").split())[-300:]
        raise CertificateError(f"openssl makes no certificate (3.0 or later is needed): {said}")
