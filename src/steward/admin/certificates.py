"""TLS certificates for compute nodes that do not use MUNGE, made by openssl.

:class:`CertificateAuthority` keeps its own CA (``ca``), Steward's server certificate
(``make_server``) and one client certificate for each node (``nodes/NAME``) in one directory, each
as ``.crt`` and ``.key``. It never changes existing files, so that nodes can be added later.
"""

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from steward.core.errors import StewardError, UsageError
from steward.slurm.nodelists import NodeListError, expand_nodelist

_TIMEOUT_S: Final = 60.0
"""Longest run of openssl, in seconds."""
_NAME: Final = re.compile(r"[A-Za-z0-9*:][A-Za-z0-9.:_-]{0,252}")
_ADDRESS: Final = re.compile(r"[0-9.]+|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*")
# Ignores the host's openssl.cnf, which makes every certificate a CA's.
_CONFIG: Final = "[req]\ndistinguished_name = name\nprompt = no\n[name]\nCN = {}\n"
_MOST_COMMON_NAME: Final = 64
"""Longest common name in X.509, in characters."""


class CertificateError(StewardError):
    """A certificate cannot be made."""


class CertificateAuthority:
    """Certificate authority of one site's nodes.

    Args:
        directory: Directory of all its files; created with mode 0711 if missing.
        days: Validity of new certificates, in days.

    Raises:
        CertificateError: The directory or the authority cannot be made.
    """

    def __init__(self, directory: str, days: int) -> None:
        self._directory = Path(directory)
        self._days = days
        try:
            # Steward's user must reach its own key here.
            self._directory.mkdir(mode=0o711, exist_ok=True)
            (self._directory / "nodes").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise CertificateError(f"cannot create {directory}: {error.strerror}") from error
        self.ca_file = str(self._directory / "ca.crt")
        extensions = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign")
        self._make(self._directory / "ca", "Steward's nodes", extensions, signed=False)

    def make_server(self, names: Sequence[str]) -> bool:
        """Make Steward's server certificate for these names and addresses; return True if new.

        Raises:
            UsageError: A name is neither a host's name nor an address.
            CertificateError: openssl fails.
        """
        for name in names:
            if _NAME.fullmatch(name) is None:
                raise UsageError(f"invalid host {name!r}: give a host name or an address")
        alt_names = [f"{'IP' if _ADDRESS.fullmatch(name) else 'DNS'}:{name}" for name in names]
        return self._make_leaf(self._directory / "server", names[0], alt_names, "serverAuth")

    def make_nodes(self, nodelist: str, cluster: str = "") -> Iterator[tuple[str, bool]]:
        """Make a certificate for each node of a list; yield its name, and True if it is new.

        Args:
            nodelist: Node list as Slurm writes it: ``n[1-3],gpu7``.
            cluster: Name of the cluster, if one Steward serves several.

        Raises:
            UsageError: It is no list of nodes.
            CertificateError: openssl fails.
        """
        try:
            names = expand_nodelist(nodelist)
        except NodeListError as error:
            raise UsageError(str(error)) from error
        for name in names:
            if _NAME.fullmatch(name) is None:
                raise UsageError(
                    f"invalid node name {name!r}: use letters, digits, '.', '_' and '-'"
                )
            # Within a cluster the node name is unique; among several only both names together are.
            alt_names = [f"DNS:{name}.{cluster}"] if cluster else [f"DNS:{name}"]
            yield (
                name,
                self._make_leaf(self._directory / "nodes" / name, name, alt_names, "clientAuth"),
            )

    def _make_leaf(self, stem: Path, name: str, alt_names: Iterable[str], use: str) -> bool:
        extensions = (
            "basicConstraints=critical,CA:FALSE",
            "keyUsage=critical,digitalSignature",
            f"extendedKeyUsage={use}",
            f"subjectAltName={','.join(alt_names)}",
        )
        return self._make(stem, name, extensions, signed=True)

    def _make(self, stem: Path, name: str, extensions: Sequence[str], *, signed: bool) -> bool:
        """Make a key and certificate, unless both exist; return True if new."""
        certificate, key = Path(f"{stem}.crt"), Path(f"{stem}.key")
        if certificate.exists() and key.exists():
            return False
        new_certificate, new_key = Path(f"{stem}.crt.new"), Path(f"{stem}.key.new")
        authority = str(self._directory / "ca")
        signer = ("-CA", f"{authority}.crt", "-CAkey", f"{authority}.key") if signed else ()
        command = [
            *("openssl", "req", "-x509", "-config", "/dev/stdin", "-days", str(self._days)),
            *(*signer, "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(new_key), "-out", str(new_certificate)),
            *(word for extension in extensions for word in ("-addext", extension)),
        ]
        _run_openssl(command, _CONFIG.format(name[:_MOST_COMMON_NAME]))
        try:
            new_key.chmod(0o600)
            new_certificate.chmod(0o644)
            new_key.replace(key)
            new_certificate.replace(certificate)
        except OSError as error:
            raise CertificateError(f"{stem}: {error.strerror}", str(stem)) from error
        return True


def _run_openssl(command: Sequence[str], text: str) -> None:
    """Run openssl with a configuration on standard input."""
    try:
        result = subprocess.run(
            command,
            input=text.encode(),
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            umask=0o077,
            env={"PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"), "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CertificateError(f"cannot run openssl: {error}") from error
    if result.returncode:
        message = " ".join(result.stderr.decode("utf-8", "backslashreplace").split())[-300:]
        raise CertificateError(
            f"openssl failed to create a certificate (3.0 or later is required): {message}"
        )
