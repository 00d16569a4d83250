"""Settings of event forwarding: [receive] of ``steward serve``, [forward] of a controller."""

from steward.core.section import Section


class ReceiveSettings(Section, frozen=True, kw_only=True):
    """[receive]: where ``steward serve`` accepts events from controllers on other hosts.

    Attributes:
        listen: Address and port (``0.0.0.0:6825``, ``[::]:6825``); if empty, the receiver is off.
        certificate_file: Server certificate with its chain; without one, no encryption.
        key_file: Private key of that certificate.
        client_ca_file: CA certificates that verify the controllers' certificates; with it a
            controller is authenticated by its certificate, otherwise by MUNGE.
        munge_users: Users that a controller may run as, beside root and Steward's own user.
    """

    listen: str = ""
    certificate_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    munge_users: tuple[str, ...] = ()


class ForwardSettings(Section, frozen=True, kw_only=True):
    """[forward]: where ``steward controller`` sends the events it captures.

    Attributes:
        to: Host and port of the ``steward serve`` that receives the events.
        tls: Whether the connection is encrypted.
        ca_file: CA certificates that verify the server's certificate; the system's if empty.
        certificate_file: Client certificate that authenticates this host; without one, MUNGE does.
        key_file: Private key of that certificate.
        munge_users: Users that the server may run as, beside root and Steward's own user.
        timeout_s: Longest time to wait for an answer of the server, in seconds.
    """

    to: str = ""
    tls: bool = False
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    munge_users: tuple[str, ...] = ()
    timeout_s: float = 60.0
