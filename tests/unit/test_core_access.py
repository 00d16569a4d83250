"""Visibility rules: examples, and properties that hold for all roles and names."""

from hypothesis import given
from hypothesis import strategies as st

from steward.core.access import Access, Caller, ClusterRoles, VisibleJobs
from steward.core.config import AccessSettings

OWN_UID = 900

names = st.sampled_from(["", "ada", "bela", "carl", "root"])
uids = st.sampled_from([0, OWN_UID, 1001, 1002, 1003])
accounts = st.sampled_from(["", "physics", "biology"])
askers = st.builds(Caller, uid=uids, user=names, how=st.sampled_from(["socket", "local", "munge"]))
standings = st.none() | st.builds(
    ClusterRoles,
    private_data=st.frozensets(st.sampled_from(["jobs", "usage", "users"])),
    admins=st.frozensets(names, max_size=2),
    administrators=st.frozensets(names, max_size=2),
    coordinators=st.dictionaries(accounts, st.frozensets(names, max_size=2), max_size=2),
)
settings = st.builds(
    AccessSettings,
    operators=st.lists(names, max_size=2).map(tuple),
    administrators=st.lists(names, max_size=2).map(tuple),
    coordinators_read_scripts=st.booleans(),
)


def access(standing: ClusterRoles | None = None, **options: object) -> Access:
    return Access(AccessSettings(**options), OWN_UID, lambda _cluster: standing)  # type: ignore[arg-type]  # options of the one test


ADA = Caller(uid=1001, user="ada")
BELA = Caller(uid=1002, user="bela")


def reads(who: Access, asker: Caller, *, account: str = "physics") -> bool:
    """Return whether the caller may read a script that ada submitted."""
    return who.can_read_script(asker, "c", uid=1001, user_at_submit="ada", account=account)


def test_owner_reads_own_script_and_nobody_elses() -> None:
    who = access(ClusterRoles())
    assert reads(who, ADA)
    assert not reads(who, BELA)


def test_root_and_own_user_are_operators() -> None:
    who = access(None)
    assert who.is_operator(Caller(uid=0), "c")
    assert who.is_operator(Caller(uid=OWN_UID), "c")
    assert not who.is_operator(ADA, "c")


def test_operators_come_from_the_configuration_and_from_slurm() -> None:
    assert access(None, operators=("bela",)).is_operator(BELA, "c")
    assert access(ClusterRoles(admins=frozenset({"bela"}))).is_operator(BELA, "c")


def test_administrators_come_from_the_configuration_and_from_slurm() -> None:
    assert access(None, administrators=("bela",)).is_administrator(BELA, "c")
    assert access(ClusterRoles(administrators=frozenset({"bela"}))).is_administrator(BELA, "c")
    assert access(None).is_administrator(Caller(uid=0), "c")
    assert access(None).is_administrator(Caller(uid=OWN_UID), "c")


def test_an_operator_is_no_administrator() -> None:
    who = access(ClusterRoles(admins=frozenset({"bela"})), operators=("ada",))
    assert not who.is_administrator(ADA, "c")
    assert not who.is_administrator(BELA, "c")


@given(settings, standings, askers)
def test_administrators_are_operators(
    chosen: AccessSettings, standing: ClusterRoles | None, asker: Caller
) -> None:
    who = Access(chosen, OWN_UID, lambda _cluster: standing)
    assert who.is_operator(asker, "c") or not who.is_administrator(asker, "c")


def test_a_name_that_is_none_has_no_rights() -> None:
    nobody = Caller(uid=1003, user="")
    who = access(ClusterRoles(administrators=frozenset({""})), administrators=("",))
    assert not who.is_administrator(nobody, "c")


def test_nodes_are_hidden_by_private_data() -> None:
    assert access(ClusterRoles()).can_see_nodes(ADA, "c")
    hidden = ClusterRoles(private_data=frozenset({"nodes"}))
    assert not access(hidden).can_see_nodes(ADA, "c")
    assert access(hidden, operators=("ada",)).can_see_nodes(ADA, "c")
    assert not access(None).can_see_nodes(ADA, "c")


def test_admin_of_one_cluster_is_not_admin_of_another() -> None:
    per_cluster = {"one": ClusterRoles(admins=frozenset({"bela"})), "two": ClusterRoles()}
    who = Access(AccessSettings(), OWN_UID, per_cluster.get)
    assert who.is_operator(BELA, "one")
    assert not who.is_operator(BELA, "two")


def test_who_is_given_a_former_users_uid_does_not_get_their_scripts() -> None:
    assert not reads(access(ClusterRoles()), Caller(uid=1001, user="newcomer"))


def test_who_takes_a_former_users_name_does_not_get_their_scripts() -> None:
    assert not reads(access(ClusterRoles()), Caller(uid=1777, user="ada"))


def test_uid_that_resolved_to_nothing_at_submit_is_nobodys() -> None:
    who = access(ClusterRoles())
    for asker in (Caller(uid=1001, user="ada"), Caller(uid=1001, user="")):
        assert not who.can_read_script(asker, "c", uid=1001, user_at_submit="", account="")


def test_private_jobs_show_own_and_coordinated() -> None:
    standing = ClusterRoles(
        private_data=frozenset({"jobs"}), coordinators={"physics": frozenset({"bela"})}
    )
    who = access(standing)
    assert who.get_job_scope(BELA, "c") == VisibleJobs(uid=1002, accounts=frozenset({"physics"}))
    assert who.can_see_job(BELA, "c", 1001, "physics")
    assert not who.can_see_job(BELA, "c", 1001, "biology")
    assert who.can_see_job(ADA, "c", 1001, "biology")


def test_records_are_everyones_unless_slurm_says_private() -> None:
    assert access(ClusterRoles()).can_see_job(BELA, "c", 1001, "physics")
    assert not access(None).can_see_job(BELA, "c", 1001, "physics")


def test_coordinators_read_scripts_only_if_the_site_says_so() -> None:
    standing = ClusterRoles(coordinators={"physics": frozenset({"bela"})})
    assert not reads(access(standing), BELA)
    assert reads(access(standing, coordinators_read_scripts=True), BELA)
    assert not reads(access(standing, coordinators_read_scripts=True), BELA, account="biology")


@given(settings, standings, askers, st.none() | uids, names, accounts)
def test_a_script_is_read_by_owner_operator_or_allowed_coordinator_alone(
    chosen: AccessSettings,
    standing: ClusterRoles | None,
    asker: Caller,
    uid: int | None,
    user: str,
    account: str,
) -> None:
    who = Access(chosen, OWN_UID, lambda _cluster: standing)
    may = who.can_read_script(asker, "c", uid=uid, user_at_submit=user, account=account)
    if who.is_operator(asker, "c"):
        assert may
        return
    is_owner = uid == asker.uid and user == asker.user and user != ""
    coordinates = (
        chosen.coordinators_read_scripts
        and uid is not None
        and account != ""
        and account in who.list_coordinated(asker, "c")
    )
    assert may == (is_owner or coordinates)


@given(settings, standings, askers)
def test_an_asker_without_a_name_has_no_role_beyond_the_uid(
    chosen: AccessSettings, standing: ClusterRoles | None, asker: Caller
) -> None:
    who = Access(chosen, OWN_UID, lambda _cluster: standing)
    nameless = Caller(uid=asker.uid, user="", how=asker.how)
    assert who.is_operator(nameless, "c") == (asker.uid in (0, OWN_UID))
    assert who.list_coordinated(nameless, "c") == frozenset()


@given(settings, standings, askers, uids, accounts)
def test_an_unverified_script_is_for_operators_alone(
    chosen: AccessSettings, standing: ClusterRoles | None, asker: Caller, uid: int, account: str
) -> None:
    who = Access(chosen, OWN_UID, lambda _cluster: standing)
    may = who.can_read_script(asker, "c", uid=None, user_at_submit=asker.user, account=account)
    assert may == who.is_operator(asker, "c")
