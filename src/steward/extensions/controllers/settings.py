"""Settings of event forwarding: [receive] of ``steward serve``, [forward] of a controller."""

from steward.core.section import Section, TlsReference


class ReceiveSettings(Section, frozen=True, kw_only=True):
    """[receive]: where ``steward serve`` accepts events from controllers on other hosts.

    Attributes:
        listen: Address and port (``0.0.0.0:6825``, ``[::]:6825``); if empty, the receiver is off.
        tls: Name of a table ``[tls.NAME]``; if empty, no encryption. If it has a
            ``client_ca_file``, certificates authenticate controllers, otherwise MUNGE does.
    """

    listen: str = ""
    tls: TlsReference = None


class ForwardSettings(Section, frozen=True, kw_only=True):
    """[forward]: where ``steward controller`` sends the events it captures.

    Attributes:
        to: Host and port of the ``steward serve`` that receives the events.
        tls: Name of a table ``[tls.NAME]``; if empty, no encryption. If it has a
            ``certificate_file``, that authenticates this host in place of MUNGE.
    """

    to: str = ""
    tls: TlsReference = None
