"""The settings between ``steward controller`` and ``steward serve``."""

from steward.core.section import Section


class ReceiveSettings(Section, frozen=True, kw_only=True):
    """[receive]: what is taken from the ``steward controller`` of other hosts.

    Attributes:
        listen: Address and port (``0.0.0.0:6825``, ``[::]:6825``); nothing is taken if empty.
        certificate_file: Our certificate, with what signed it; without one, no encryption.
        key_file: The key of that certificate.
        client_ca_file: Certificates that the controllers' are checked against; with it a
            controller is known by its certificate, else by MUNGE.
        munge_users: Users that a controller may run as, beside root and our own user.
    """

    listen: str = ""
    certificate_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    munge_users: tuple[str, ...] = ()


class ForwardSettings(Section, frozen=True, kw_only=True):
    """[forward]: where ``steward controller`` sends what it captures.

    Attributes:
        to: Host and port of the ``steward serve`` that takes it.
        tls: Whether the connection is encrypted.
        ca_file: Certificates that the server's is checked against; the system's if empty.
        certificate_file: Our certificate, where we are known by it; else by MUNGE.
        key_file: The key of that certificate.
        munge_users: Users that the server may run as, beside root and our own user.
        timeout_s: How long the server may take to answer, in seconds.
    """

    to: str = ""
    tls: bool = False
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    munge_users: tuple[str, ...] = ()
    timeout_s: float = 60.0
