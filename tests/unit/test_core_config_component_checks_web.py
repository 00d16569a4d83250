"""Checks of [web] name the key."""

import os
from pathlib import Path
from typing import Any

import pytest

from steward.core.config import Settings
from steward.core.config.component_checks import check_tls, check_web
from steward.core.section import TlsSettings
from steward.web.settings import WebSettings


def said(tmp_path: Path, **web: Any) -> list[str]:
    tls = {"pages": web["tls"]} if "tls" in web else {}
    settings = Settings(state_dir=str(tmp_path), tls=tls, web=WebSettings(**web))
    return [problem.what for problem in (*check_web(settings), *check_tls(settings))]


@pytest.mark.parametrize(
    "web",
    [
        {},
        {"listen": "127.0.0.1:8290"},
        {"listen": "[::1]:8290", "url": "https://ood.example.org/pun/steward/"},
        {"proxy_header": "X-Remote-User", "trusted_proxies": ("10.0.0.1", "fe80::1")},
        {"user": "nobody"},
        {"munge_from": ("10.1.2.0/24", "192.0.2.7")},
    ],
)
def test_what_is_right_passes(tmp_path: Path, web: dict[str, Any]) -> None:
    assert said(tmp_path, **web) == []


@pytest.mark.parametrize(
    ("web", "what"),
    [
        ({"listen": "8290"}, "'web.listen' must be an address"),
        ({"listen": "127.0.0.1:99999"}, "'web.listen' must be an address"),
        ({"user": ""}, "'web.user' is empty"),
        ({"user": "root"}, "'web.user' is root"),
        ({"url": "ondemand.example.org"}, "'web.url' must be the URL that browsers use"),
        ({"url": "ftp://host"}, "'web.url' must be"),
        ({"url": "https://ada@host/"}, "'web.url' must be"),
        ({"url": "https://host/?x"}, "'web.url' must be"),
        ({"url": "https://host:0x/"}, "'web.url' must be"),
        ({"url": "https://host/a b"}, "'web.url' has the path"),
        ({"url": "https://host//evil"}, "'web.url' has the path"),
        ({"tls": TlsSettings(certificate_file="/c")}, "key_file"),
        ({"tls": TlsSettings(key_file="/k")}, "certificate_file"),
        ({"tls": TlsSettings()}, "[web] listens with TLS but without a certificate"),
        ({"proxy_header": "X User"}, "is not a header name"),
        ({"proxy_header": "Cookie"}, "any client can send this header"),
        ({"proxy_header": "X-User", "trusted_proxies": ()}, "needs 'trusted_proxies'"),
        ({"trusted_proxies": ("localhost",)}, "'web.trusted_proxies' contains 'localhost'"),
        ({"trusted_proxies": ("10.0.0.0/8",)}, "is not an IP address"),
        ({"metrics_from": ("",)}, "'web.metrics_from' contains ''"),
        ({"munge_from": ("login1",)}, "'web.munge_from' contains 'login1', which is not a network"),
        ({"munge_from": ("10.0.0.0/8", "2001:db8::/32")}, "contains '2001:db8::/32': use an IPv4"),
        ({"token_days": 0}, "'web.token_days' must be above 0"),
        ({"token_days": 3661}, "'web.token_days' must be above 0 and at most 3660"),
        ({"requests_per_minute": 0}, "'web.requests_per_minute' must be 1 or more"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, web: dict[str, Any], what: str) -> None:
    found = said(tmp_path, **web)
    assert any(what in one for one in found), found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_the_daemons_own_user_serves_no_pages(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, -1)
    assert "the daemon's own user" in said(tmp_path, user="nobody")[0]
