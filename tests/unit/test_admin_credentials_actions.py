"""Links, sessions and tokens: owner, lifetime and scopes."""

import os
import pwd
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.admin.credentials.errors import CredentialMissing
from steward.admin.credentials.munge_authentication import make_ticket, verify_munge_request
from steward.admin.credentials.requests import (
    CloseRequest,
    LoginAnswer,
    LoginRequest,
    OpenAnswer,
    OpenRequest,
    PeekAnswer,
    PeekRequest,
    TicketRequest,
    TokenAnswer,
    TokenCreateRequest,
    TokenListAnswer,
    TokenListRequest,
    TokenRevokeRequest,
)
from steward.admin.credentials.sessions import CredentialsContext
from steward.admin.credentials.store import CredentialStore, end_revoked
from steward.core.access import (
    ALL_SCOPES,
    Access,
    Caller,
    ScopeRefused,
    check_scope,
)
from steward.core.actions import Action, ActionError, Registry, action, decode_request
from steward.core.config import AccessSettings, Settings
from steward.core.errors import PermissionRefused, UnknownCredential, UsageError
from steward.core.munge import MungeUnavailable, hash_body
from steward.core.section import TlsSettings
from steward.daemon.registry import ACTIONS, import_actions
from steward.slurm.settings import ClusterSettings
from steward.web.settings import WebSettings

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
NOBODY = pwd.getpwnam("nobody")
ADA = Caller(uid=NOBODY.pw_uid, user="nobody")
WEB = Caller(uid=pwd.getpwnam("daemon").pw_uid, user="daemon")
ROOT = Caller(uid=0, user="root", how="local")


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now


def room_in(directory: Path, clock: Clock, **web: object) -> CredentialsContext:
    settings = Settings(
        state_dir=str(directory),
        cluster={"box": ClusterSettings()},
        web=WebSettings(**{"listen": "127.0.0.1:8290", "user": "daemon", **web}),  # type: ignore[arg-type]
    )
    access = Access(AccessSettings(), os.geteuid(), lambda _: None)
    return CredentialsContext(settings, access=access, now=clock)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def room(tmp_path: Path, clock: Clock) -> CredentialsContext:
    return room_in(tmp_path, clock)


def ask(room: CredentialsContext, name: str, asker: Caller, request: object) -> object:
    return Registry(import_actions("credentials").values(), {"credentials": lambda: room}).call(
        name, asker, request
    )


def login(room: CredentialsContext, asker: Caller = ADA) -> str:
    answer = ask(room, "credentials.login", asker, LoginRequest())
    assert isinstance(answer, LoginAnswer)
    return answer.url.rpartition("/")[2]


def opened(room: CredentialsContext, **asked: str) -> str:
    answer = ask(room, "credentials.open", WEB, OpenRequest(**asked))
    assert isinstance(answer, OpenAnswer)
    return answer.secret


def token(room: CredentialsContext, asker: Caller = ADA, **asked: object) -> TokenAnswer:
    request = TokenCreateRequest(**asked)  # type: ignore[arg-type]
    answer = ask(room, "credentials.token_create", asker, request)
    assert isinstance(answer, TokenAnswer)
    return answer


def test_a_link_opens_one_session(room: CredentialsContext) -> None:
    link = login(room)
    assert ask(room, "credentials.peek", WEB, PeekRequest(secret=link)) == (
        PeekAnswer(user="nobody")
    )
    bearer = room.find_caller(opened(room, secret=link))
    assert bearer == Caller(uid=ADA.uid, user="nobody", how="session")
    with pytest.raises(UnknownCredential):
        opened(room, secret=link)


def test_a_link_and_a_session_end(room: CredentialsContext, clock: Clock) -> None:
    link = login(room)
    clock.now += timedelta(seconds=301)
    with pytest.raises(UnknownCredential):
        opened(room, secret=link)
    session = opened(room, secret=login(room))
    clock.now += timedelta(hours=11)
    assert room.find_caller(session).user == "nobody"
    clock.now += timedelta(hours=1)
    with pytest.raises(UnknownCredential):
        room.find_caller(session)


def test_a_session_is_closed(room: CredentialsContext) -> None:
    session = opened(room, secret=login(room))
    ask(room, "credentials.close", WEB, CloseRequest(secret=session))
    with pytest.raises(UnknownCredential):
        room.find_caller(session)


@pytest.mark.parametrize("name", ["credentials.open", "credentials.peek", "credentials.close"])
def test_only_the_pages_process_opens_sessions(room: CredentialsContext, name: str) -> None:
    request = ACTIONS[name].request(secret=login(room))
    by_token = Caller(uid=WEB.uid, user=WEB.user, how="token")
    for asker in (ADA, by_token):
        with pytest.raises(PermissionRefused, match="daemon"):
            ask(room, name, asker, request)


def test_a_proxy_names_users_only_where_it_is_trusted(tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(PermissionRefused, match="proxy_header"):
        opened(room_in(tmp_path, clock), user="nobody")
    trusting = room_in(tmp_path, clock, proxy_header="X-Remote-User")
    assert trusting.find_caller(opened(trusting, user="nobody")).uid == NOBODY.pw_uid
    for user in ("root", "no such user", "a\0b"):
        with pytest.raises(UnknownCredential):
            opened(trusting, user=user)


def test_a_session_makes_no_link_and_a_token_no_token(room: CredentialsContext) -> None:
    with pytest.raises(PermissionRefused):
        login(room, Caller(uid=ADA.uid, user="nobody", how="session"))
    with pytest.raises(PermissionRefused):
        token(room, Caller(uid=ADA.uid, user="nobody", how="token"))


def test_what_a_token_is_good_for(room: CredentialsContext, clock: Clock) -> None:
    made = token(room, scopes=("read", "bank"), expires_s=60.0, name="cron")
    bearer = room.find_caller(made.secret)
    assert bearer == Caller(
        uid=ADA.uid, user="nobody", how="token", scopes=frozenset({"read", "bank"})
    )
    for name in ("accounting.sacct", "bank.deposit"):
        check_scope(bearer, name, ACTIONS[name].scope)
    for name in ("archive.show", "automation.run", "journal.retry", "credentials.token_create"):
        with pytest.raises(ScopeRefused, match="scope"):
            check_scope(bearer, name, ACTIONS[name].scope)
    clock.now += timedelta(seconds=60)
    with pytest.raises(UnknownCredential):
        room.find_caller(made.secret)


DAY_S = 86400.0


def life_days(made: TokenAnswer) -> float:
    return (made.token.expires - NOW) / timedelta(days=1)


def test_what_rests_on_munges_word_alone_lasts_shorter(room: CredentialsContext) -> None:
    """The limit also holds through a login link that MUNGE created, and through its session."""
    by_munge = room.find_caller(make_ticket(ADA.uid, "nobody", NOW))
    by_session = room.find_caller(opened(room, secret=login(room, by_munge)))
    for asker in (by_munge, by_session):
        made = token(room, asker)
        assert (made.token.how, life_days(made)) == ("munge", 30)
        assert life_days(token(room, asker, expires_s=30 * DAY_S)) == 30
        with pytest.raises(
            UsageError, match="at most 30 days for a caller that MUNGE authenticates"
        ):
            token(room, asker, expires_s=30 * DAY_S + 1)
    by_kernel = room.find_caller(opened(room, secret=login(room)))
    for asker in (ADA, by_kernel):
        made = token(room, asker)
        assert (made.token.how, life_days(made)) == (asker.how, 90)
        assert life_days(token(room, asker, expires_s=366 * DAY_S)) == 366


@pytest.mark.parametrize(
    ("peer", "is_heard"),
    [
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("127.0.0.1", True),  # a proxy in front of the pages: whose connection it has is not known
        ("10.2.0.1", False),
        ("::ffff:10.2.0.1", False),
        ("2001:db8::1", False),
        ("", False),
    ],
)
def test_munge_is_asked_for_connections_from_its_networks(peer: str, is_heard: bool) -> None:
    web = WebSettings(munge_from=("10.1.0.0/16",), munge_socket="/nowhere")
    asked = {"method": "GET", "target": "/api/v1/me", "digest": hash_body(b"")}
    shown = TicketRequest(credential="MUNGE:none:", peer=peer, **asked)
    with pytest.raises(MungeUnavailable if is_heard else UnknownCredential):
        verify_munge_request(web, shown)


def test_no_token_lasts_longer_than_any_may(tmp_path: Path, clock: Clock) -> None:
    room = room_in(tmp_path, clock, token_days=7)
    by_munge = room.find_caller(make_ticket(ADA.uid, "nobody", NOW))
    assert [life_days(token(room, asker)) for asker in (ADA, by_munge)] == [7, 7]


def test_tokens_are_listed_and_taken_back_by_their_owner(room: CredentialsContext) -> None:
    mine, other = token(room), token(room, WEB)
    listed = ask(room, "credentials.token_list", ADA, TokenListRequest())
    assert isinstance(listed, TokenListAnswer)
    assert listed.empty_reason == "No tokens. 'steward token create' creates one."
    assert [one.id for one in listed.tokens] == [mine.token.id]
    for asker, number in ((ADA, other.token.id), (WEB, mine.token.id)):
        request = TokenRevokeRequest(numbers=(number,))
        with pytest.raises(CredentialMissing):
            ask(room, "credentials.token_revoke", asker, request)
    with pytest.raises(ActionError, match=">= 1"):
        decode_request(ACTIONS["credentials.token_revoke"], {"numbers": [0]})
    for asker, one in ((ADA, mine), (ROOT, other)):
        request = TokenRevokeRequest(numbers=(one.token.id,))
        ask(room, "credentials.token_revoke", asker, request)
        with pytest.raises(UnknownCredential):
            room.find_caller(one.secret)


def test_a_reused_uid_neither_shows_nor_takes_back_its_former_holders_tokens(
    room: CredentialsContext,
) -> None:
    former = token(room)
    heir = Caller(uid=ADA.uid, user="heir")

    def listed(asker: Caller, **request: bool) -> list[int]:
        answer = ask(room, "credentials.token_list", asker, TokenListRequest(**request))
        assert isinstance(answer, TokenListAnswer)
        return [one.id for one in answer.tokens]

    assert listed(heir) == listed(heir, sessions=True) == []
    with pytest.raises(CredentialMissing):
        ask(room, "credentials.token_revoke", heir, TokenRevokeRequest(numbers=(former.token.id,)))
    assert listed(ROOT, everybodys=True) == [former.token.id]


def test_nobody_has_tokens_without_number(room: CredentialsContext) -> None:
    made = [token(room) for _ in range(100)]
    with pytest.raises(UsageError, match="revoke"):
        token(room)
    request = TokenRevokeRequest(numbers=(made[0].token.id,))
    ask(room, "credentials.token_revoke", ADA, request)
    token(room)


def test_only_root_makes_tokens_for_others(room: CredentialsContext) -> None:
    with pytest.raises(PermissionRefused):
        token(room, user="daemon")
    assert token(room, ROOT, user="daemon").token.uid == WEB.uid


@pytest.mark.parametrize(
    "asked",
    [{"expires_s": 0.0}, {"expires_s": 400 * 86400.0}, {"scopes": ()}, {"name": "a\nb"}],
)
def test_what_no_token_can_be(room: CredentialsContext, asked: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        token(room, ADA, **asked)


def test_who_is_another_one_by_now_is_not_known(tmp_path: Path) -> None:
    store = CredentialStore(str(tmp_path))
    secret, _ = store.create(
        "token", uid=ADA.uid, user="formerly", how="socket", now=NOW, expires=NOW.replace(year=2030)
    )
    with pytest.raises(UnknownCredential, match="another user with the same uid"):
        store.find_valid("token", secret, NOW)


def test_no_secret_is_kept(room: CredentialsContext, tmp_path: Path) -> None:
    made = [login(room), opened(room, secret=login(room)), token(room).secret]
    for path in tmp_path.rglob("*"):
        data = path.read_bytes()
        assert not any(secret.encode() in data for secret in made), path
        assert path.stat().st_mode & 0o077 == 0


@given(st.text(max_size=80))
def test_what_nobody_made_is_not_known(text: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        room = room_in(Path(directory), Clock())
        for prefix in ("", "sts_", "stt_", "stl_"):
            with pytest.raises(UnknownCredential):
                room.find_caller(prefix + text)
        room.store.close()


@pytest.mark.parametrize("name", sorted(ACTIONS))
def test_somebody_has_thought_about_every_actions_scope(name: str) -> None:
    assert ACTIONS[name].scope in ALL_SCOPES or name == "credentials.me"


def test_what_is_not_known_takes_the_most() -> None:
    with pytest.raises(TypeError, match="scope"):
        action("new.thing")  # type: ignore[call-arg] # no action is open by accident
    fields = msgspec.structs.fields(Action)
    assert next(field.default for field in fields if field.name == "scope") == "admin"


OPERATORS = AccessSettings(operators=("nobody",))
SEES = ("status.show", "archive.show")
CHANGES = ("automation.run", "bank.deposit", "journal.retry")


def sees_and_changes(room: CredentialsContext, secret: str) -> tuple[bool, bool]:
    """Return whether a secret's owner can read what operators read, and change what they change."""
    access = Access(OPERATORS, 4711, lambda _: None)
    asker = room.find_caller(secret)

    def is_operator(name: str) -> bool:
        def run(_context: object, asker: Caller, _request: object) -> bool:
            return access.is_operator(asker, "box")

        action = msgspec.structs.replace(ACTIONS[name], run=run)
        request = msgspec.convert({}, msgspec.defstruct("Empty", []))
        action = msgspec.structs.replace(action, request=type(request))
        made = Registry((action,), {action.package: lambda: None})
        return bool(made.call(name, asker, request))

    (sees,) = {is_operator(name) for name in SEES}
    (changes,) = {is_operator(name) for name in CHANGES}
    return sees, changes


@pytest.mark.parametrize(
    ("web", "by_link", "by_proxy"),
    [
        ({}, (True, True), (True, False)),
        ({"proxy_operators": True}, (True, True), (True, True)),
        ({"url": "https://steward.example.org/"}, (True, True), (True, False)),
        ({"url": "https://portal/steward"}, (False, False), (False, False)),
        (
            {"url": "https://portal/steward", "proxy_operators": True},
            (False, False),
            (False, False),
        ),
        ({"url": "https://own/steward", "own_host": True}, (True, True), (True, False)),
    ],
)
def test_how_far_an_operators_rights_go_in_a_session(
    tmp_path: Path,
    clock: Clock,
    web: dict[str, object],
    by_link: tuple[bool, bool],
    by_proxy: tuple[bool, bool],
) -> None:
    room = room_in(tmp_path, clock, proxy_header="X-Remote-User", **web)
    for session, expected in (
        (opened(room, secret=login(room)), by_link),
        (opened(room, user="nobody"), by_proxy),
    ):
        assert sees_and_changes(room, session) == expected
        # A link created in it gives no more rights, also when a program uses it.
        made = token(room, room.find_caller(session), scopes=tuple(ALL_SCOPES))
        assert sees_and_changes(room, made.secret) == expected
    made = token(room, ADA, scopes=tuple(ALL_SCOPES))
    assert sees_and_changes(room, made.secret) == (True, True)


def test_a_proxys_session_lasts_minutes_and_is_renewed_by_use(tmp_path: Path, clock: Clock) -> None:
    room = room_in(tmp_path, clock, proxy_header="X-Remote-User")
    used, left = opened(room, user="nobody"), opened(room, user="nobody")
    for _ in range(30):
        clock.now += timedelta(minutes=5)
        assert room.find_caller(used).user == "nobody"
    with pytest.raises(UnknownCredential):
        room.find_caller(left)
    clock.now += timedelta(minutes=11)
    with pytest.raises(UnknownCredential):
        room.find_caller(used)


@pytest.mark.parametrize(
    ("web", "cookie"),
    [
        ({}, "steward_session"),
        ({"url": "http://x/steward"}, "steward_session"),
        ({"url": "https://steward.example.org"}, "__Host-steward_session"),
        ({"url": "https://steward.example.org/"}, "__Host-steward_session"),
        ({"tls": TlsSettings(certificate_file="/x", key_file="/x")}, "__Host-steward_session"),
        ({"url": "https://portal/steward", "own_host": True}, "__Secure-steward_session"),
    ],
)
def test_a_browser_takes_the_cookie_from_its_own_host_alone(
    web: dict[str, Any], cookie: str
) -> None:
    assert WebSettings(**web).cookie == cookie


def test_what_was_revoked_stays_so_when_a_backup_is_put_back(tmp_path: Path, clock: Clock) -> None:
    for name in ("before", "restored", "lost"):
        (tmp_path / name).mkdir()
    room = room_in(tmp_path / "before", clock)
    kept, revoked = token(room, scopes=("read",)), token(room, scopes=("read",))
    session = opened(room, secret=login(room))
    room.store.close()
    database = (tmp_path / "before" / "credentials.db").read_bytes()
    for name in ("restored", "lost"):
        (tmp_path / name / "credentials.db").write_bytes(database)
    room = room_in(tmp_path / "before", clock)
    ask(
        room,
        "credentials.token_revoke",
        ADA,
        TokenRevokeRequest(numbers=(revoked.token.id,)),
    )
    end_revoked(str(tmp_path / "restored"), str(tmp_path / "before"), NOW)
    restored = room_in(tmp_path / "restored", clock)
    assert restored.find_caller(kept.secret).user == "nobody"
    assert restored.find_caller(session).user == "nobody"
    with pytest.raises(UnknownCredential):
        restored.find_caller(revoked.secret)
    # If revocations cannot be read, every credential counts as revoked.
    end_revoked(str(tmp_path / "lost"), str(tmp_path / "nothing"), NOW)
    lost = room_in(tmp_path / "lost", clock)
    for secret in (kept.secret, revoked.secret, session):
        with pytest.raises(UnknownCredential):
            lost.find_caller(secret)


def test_a_user_who_makes_many_fills_no_disk_and_keeps_the_valid_ones(
    room: CredentialsContext, clock: Clock
) -> None:
    kept, other = token(room, scopes=("read",)), token(room, ROOT, scopes=("read",))
    for number in range(230):
        made = token(room, scopes=("read",))
        ask(room, "credentials.token_revoke", ADA, TokenRevokeRequest(numbers=(made.token.id,)))
        link = login(room)
        if number % 2:
            opened(room, secret=link)
        clock.now += timedelta(seconds=1)
    for kind in ("token", "login", "session"):
        assert len(room.store.list_all(kind, ADA.uid)) <= 200
    assert room.store.find_valid("login", login(room), clock.now).uid == ADA.uid
    for valid in (kept, other):
        assert room.store.find_valid("token", valid.secret, clock.now).id == valid.token.id
