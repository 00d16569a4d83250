"""What proves to a search server who we are, read anew from its files whenever they change.

A password, an API key or a certificate that was exchanged is used from the
next request on, without a restart.
"""

import base64
import logging
import os
import re
from typing import Any, Final

from steward.archive.errors import ArchiveUnavailable
from steward.extensions.search_servers.settings import SearchSinkSettings

log = logging.getLogger(__name__)

_LONGEST_SECRET: Final = 1 << 16
_FIELD: Final = re.compile(r"[A-Za-z0-9+/=_-]+")
_OTHERS: Final = 0o007

Context = Any
"""An ``ssl.SSLContext``, whose module is not loaded here, or None."""

Stamp = tuple[tuple[int, int, int] | None, ...]
"""What changes when one of the files does."""


def stamp_of(settings: SearchSinkSettings) -> Stamp:
    """What tells the files' present contents from later ones."""
    return tuple(_stamp(path) for path in _files(settings))


def authorization(settings: SearchSinkSettings) -> str:
    """The value of the header Authorization; "" where there is none.

    Raises:
        ArchiveUnavailable: A file cannot be read, or does not hold what it should.
    """
    if settings.user:
        both = settings.user.encode() + b":" + _secret(settings.password_file)
        return "Basic " + base64.b64encode(both).decode("ascii")
    if settings.api_key_file:
        key = _secret(settings.api_key_file)
        encoded = base64.b64encode(key) if b":" in key else key
        text = encoded.decode("ascii", "replace")
        if _FIELD.fullmatch(text) is None:
            raise ArchiveUnavailable(
                f"{settings.api_key_file} holds no API key: write id:key, or its base64",
                settings.api_key_file,
            )
        return f"ApiKey {text}"
    return ""


def tls_context(settings: SearchSinkSettings) -> Context:
    """How the server's certificate is checked, and ours is shown; None where no URL is https.

    Raises:
        ArchiveUnavailable: A certificate or a key cannot be read.
    """
    if not any(url.lower().startswith("https:") for url in settings.urls):
        return None
    import ssl

    name = settings.ca_file
    try:
        context = ssl.create_default_context(cafile=settings.ca_file or None)
        if settings.certificate_file:
            name = settings.certificate_file
            _warn_of_readers(settings.key_file)
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(name, settings.key_file, password=lambda: b"")
    except ssl.SSLError as error:
        raise ArchiveUnavailable(
            f"{name} cannot be used as a certificate, or not with its key ({_reason(error)}): "
            "give PEM files, the key without a password",
            name,
        ) from error
    except OSError as error:
        raise _unreadable(error.filename or name, error) from error
    return context


def _files(settings: SearchSinkSettings) -> list[str]:
    return [
        path
        for path in (
            *(settings.password_file, settings.api_key_file, settings.ca_file),
            *(settings.certificate_file, settings.key_file),
        )
        if path
    ]


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None  # reading it says why
    return status.st_mtime_ns, status.st_ino, status.st_size


def _secret(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            secret = file.read(_LONGEST_SECRET).rstrip(b"\r\n")
    except OSError as error:
        raise _unreadable(path, error) from error
    if not secret:
        raise ArchiveUnavailable(f"{path} is empty: write the password or the key into it", path)
    _warn_of_readers(path)
    return secret


def _warn_of_readers(path: str) -> None:
    try:
        is_open = os.stat(path).st_mode & _OTHERS
    except OSError:
        return  # reading it says why
    if is_open:
        log.warning("%s holds a secret and every user may read it: run 'chmod 600' on it", path)


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
    return str(reason or error)


def _unreadable(path: str, error: OSError) -> ArchiveUnavailable:
    return ArchiveUnavailable(
        f"{path} cannot be read: {error.strerror or error}: Steward's user has to be able to", path
    )
