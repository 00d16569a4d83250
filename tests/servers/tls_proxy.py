"""TLS and authentication in front of a plain server, as the real products have them.

The search servers of the tests run without their security modules.
"""

import http.client
import ssl
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Final, Self

from servers.authority import Authority
from servers.search import SearchServer
from servers.server import HOST, free_port

_TIMEOUT_S: Final = 30.0
# Hop-by-hop headers (RFC 9110, section 7.6.1), and those that the proxy sets.
_NOT_PASSED_ON: Final = {"connection", "keep-alive", "transfer-encoding", "content-length"}
_REFUSAL: Final = b'{"error": {"type": "security_exception"}, "status": 401}'


class TlsProxy:
    """Proxy that passes authenticated requests on to a server; a context manager.

    Args:
        server: Server behind the proxy.
        authority: Signs the proxy's certificate, and those of clients.
        basic: Required user and password, if any.
        api_key: Required key, if any: the text after ``ApiKey``.
        client_certificate: Whether clients must have a certificate of the authority.
    """

    def __init__(
        self,
        server: SearchServer,
        authority: Authority,
        *,
        basic: tuple[str, str] | None = None,
        api_key: str = "",
        client_certificate: bool = False,
    ) -> None:
        self.wanted = set()
        if basic:
            self.wanted.add("Basic " + b64encode(":".join(basic).encode()).decode())
        if api_key:
            self.wanted.add(f"ApiKey {api_key}")
        self.answered: list[int] = []
        """Status of every answer, in order."""
        self.target = server
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*authority.certificate(f"IP:{HOST}"))
        if client_certificate:
            context.load_verify_locations(authority.file)
            context.verify_mode = ssl.CERT_REQUIRED
        self._listener = _Listener(self, context)
        self._thread = Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown()
        self._thread.join()
        self._listener.server_close()

    @property
    def url(self) -> str:
        """Base URL, without a trailing slash."""
        return f"https://{HOST}:{self._listener.server_address[1]}"


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # clients keep their connections

    def __init__(self, proxy: TlsProxy, context: ssl.SSLContext) -> None:
        self.proxy = proxy
        super().__init__((HOST, free_port()), _Handler)
        # Each connection shakes hands in its own thread: one that says nothing stops no other.
        self.socket = context.wrap_socket(
            self.socket, server_side=True, do_handshake_on_connect=False
        )

    def handle_error(self, *_: Any) -> None:
        """Log nothing: tests check the client's error."""


class _Handler(BaseHTTPRequestHandler):
    server: _Listener
    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT_S

    def handle(self) -> None:
        assert isinstance(self.connection, ssl.SSLSocket)
        self.connection.do_handshake()
        super().handle()

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        proxy = self.server.proxy
        if proxy.wanted and self.headers.get("Authorization") not in proxy.wanted:
            headers = [("WWW-Authenticate", "Basic"), ("Content-Type", "application/json")]
            self._answer(401, headers, _REFUSAL)
            return
        headers = [of for of in self.headers.items() if of[0].lower() not in _NOT_PASSED_ON]
        connection = http.client.HTTPConnection(HOST, proxy.target.port, timeout=_TIMEOUT_S)
        try:
            connection.request(self.command, self.path, body or None, dict(headers))
            response = connection.getresponse()
            self._answer(response.status, response.getheaders(), response.read())
        except (OSError, http.client.HTTPException):
            self._answer(502, [], b"")
        finally:
            connection.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815 -- http.server's names

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.server.proxy.answered.append(status)
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in _NOT_PASSED_ON:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
