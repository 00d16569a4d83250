"""Commands derived from actions, and an action added as the documentation describes."""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import steward
from harness.bank import charge, config_of, make_shared_site
from harness.commands import run
from harness.documentation import read_example
from steward.cli.commands import PRINTERS, make_command
from steward.client import Client
from steward.core.actions import Answer, describe_default, find_annotation
from steward.core.errors import UsageError
from steward.daemon.action_index import ACTION_INDEX
from steward.daemon.registry import get_action
from steward.web.api.openapi import build_openapi_json

ROOT = Path(__file__).parents[2]
COMMANDS = {name: entry for name, entry in ACTION_INDEX.items() if entry.command}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_takes_what_its_request_says(name: str) -> None:
    action = get_action(name)
    command = make_command(name)
    given = {parameter.name: parameter for parameter in command.params}
    for field in msgspec.structs.fields(action.request):
        annotation = find_annotation(field.type)
        assert annotation, f"{field.name} is not described"
        described = (annotation.extra or {}).get("input")
        if described is None or not (described.words or described.metavar):
            assert field.name not in given
            continue
        parameter = given[field.name]
        assert parameter.required == field.required
        typed = {word for words in described.words for word in words.split("/")}
        assert {*parameter.opts, *parameter.secondary_opts} >= typed
    msgspec.json.Decoder(action.request)


@pytest.mark.parametrize("name", ACTION_INDEX)
def test_a_default_is_declared_and_no_prose(name: str) -> None:
    action = get_action(name)
    fields = {field.name: field for field in msgspec.structs.fields(action.request)}
    for field in fields.values():
        annotation = find_annotation(field.type)
        assert annotation is None or "Default" not in (annotation.description or "")
    if action.command:
        for parameter in make_command(name).params:
            if parameter.name in fields and describe_default(fields[parameter.name]):
                assert " Default: " in getattr(parameter, "help", "")


def test_help_and_api_say_a_default() -> None:
    assert "Number of context lines. Default: 3." in run("archive", "diff", "--help")[1]
    code, page, _ = run("archive", "list", "--help")
    assert (code, "Default: 200 on a terminal, else all." in " ".join(page.split())) == (0, True)
    document = build_openapi_json("/api/v1").decode()
    assert "Latest submit time, exclusive. Default: now." in document
    assert "Maximum number of jobs. Default: 1000." in document


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_prints_is_there(name: str) -> None:
    action, entry = get_action(name), COMMANDS[name]
    if action.rows:
        assert issubclass(action.answer, Answer)
        layout = action.answer.layouts.get(action.rows, action.answer.layout)
        assert layout, "the rows have a layout"
        assert action.stream or hasattr(action.answer, action.rows)
    if action.stream:
        assert entry.printer, "items of a stream are printed by a function"
    if entry.printer:
        __import__(entry.printer)
        assert name in PRINTERS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_offers_only_styles_that_it_prints(name: str) -> None:
    action, command = get_action(name), make_command(name)
    printer = PRINTERS.get(name)
    has_style = printer is not None and "style" in inspect.signature(printer).parameters
    words = {word for parameter in command.params for word in parameter.opts}
    assert ("--json" in words) == (has_style or not action.stream)
    assert ("--csv" in words) == bool(action.rows and (has_style or printer is None))


def test_records_of_the_job_log_have_one_form() -> None:
    code, _, err = run("accounting", "dump", "--json")
    assert (code, "no such option '--json'" in err) == (2, True)


def test_wrong_choices_and_amounts_are_wrong_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEWARD_CONFIG", str(config_of(tmp_path)))
    for words, part in (
        (("token", "create", "--scope", "read,all"), "'--scope': 'all' is not one of"),
        (("token", "create", "--expires", "3 years"), "is not a duration"),
        (("token", "create", "--scope", ""), "--scope has no value: give one"),
        (("bank", "account", "create", "x", "--credit-limit", "much"), "much"),
        (("bank", "account", "create"), "ACCOUNT"),
        (("bank", "account", "show", "--csv", "--json"), "exclude each other"),
        (("bank", "user", "change", "physics", "ada"), "nothing to change"),
    ):
        code, _, err = run(*words)
        assert (code, part in err) == (2, True), (words, err)


@pytest.mark.parametrize(
    ("words", "message", "fields", "request_message"),
    [
        (
            ("account", "change", "physics"),
            (
                "give --parent, --owners, --credit-limit, --parent-pays, --only-listed, "
                "--close or --note"
            ),
            {"name": "physics"},
            (
                "give `parent`, `owners`, `credit_limit`, `parent_pays`, `only_listed`, "
                "`closed` or `note`"
            ),
        ),
        (
            ("user", "change", "physics", "ada"),
            "give --limit or --listed",
            {"account": "physics", "user": "ada"},
            "give `limit` or `listed`",
        ),
    ],
)
def test_errors_name_options_to_people_and_fields_to_programs(
    tmp_path: Path,
    words: tuple[str, ...],
    message: str,
    fields: dict[str, str],
    request_message: str,
) -> None:
    config = str(config_of(tmp_path))
    code, _, err = run("bank", *words, "--config", config)
    assert (code, err) == (2, f"steward: nothing to change: {message}\n")
    with pytest.raises(UsageError) as refused:
        Client(config=config).ask(f"bank.{words[0]}_change", **fields)
    assert str(refused.value) == f"nothing to change: {request_message}"


def test_no_error_of_an_action_names_an_option() -> None:
    """The command line names the option of each field that an error has in backquotes."""
    named = set()
    for path in (ROOT / "src" / "steward").rglob("*.py"):
        text = path.read_text()
        raised = ast.walk(ast.parse(text)) if "\n@action(" in text else ()
        for node in (node for node in raised if isinstance(node, ast.Raise)):
            # An error may name a whole command, such as 'steward archive show 7 --script'.
            message = re.sub("steward [^']*'", "", ast.unparse(node))
            if re.search(r"(?<![\w-])--?[A-Za-z]", message):
                named.add(path.name)
    assert named == {"page.py"}, "the command of a job's page is written by hand"


def test_a_table_is_printed_for_spreadsheets_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEWARD_CONFIG", str(config_of(tmp_path)))
    assert run("bank", "account", "create", "physics", "--note", "a, b")[0] == 0
    _, out, _ = run("bank", "account", "show", "--csv", "--format", "account,note")
    assert out.splitlines() == ["Account,Note", 'physics,"a, b"']


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Copy Steward and add the documentation's action to the copy."""
    package = Path(steward.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(package, tmp_path / "src" / "steward", ignore=ignored)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "write_action_index.py", tmp_path / "scripts")
    module = tmp_path / "src" / "steward" / "bank" / "actions" / "accounts.py"
    module.write_text(f"{module.read_text()}\n\n{read_example('Add an action')}")
    _python(tmp_path, str(tmp_path / "scripts" / "write_action_index.py"))
    return tmp_path


def _python(tree: Path, *words: str, **environment: str) -> str:
    """Run Python on a copy of Steward; return what it prints."""
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tree / "src"), "TZ": "UTC", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_action_is_added_in_one_place(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    config = str(config_of(tmp_path / "site"))
    site = make_shared_site(tmp_path / "site")
    charge(site, 7, hours=4)
    site.ledger.close()

    assert "indebted  List accounts that owe service units." in _python(
        tree, "-m", "steward", "bank", "account", "--help"
    )
    help_page = _python(tree, "-m", "steward", "bank", "account", "indebted", "--help")
    assert "--beyond AMOUNT" in help_page
    assert "Operators see all" in help_page

    rows = _python(
        *(tree, "-m", "steward", "bank", "account", "indebted", "--beyond", "-500", "-P", "-n"),
        STEWARD_CONFIG=config,
    )
    facts = json.loads(
        _python(
            tree,
            "-c",
            "import json; from steward.client import Client; "
            "from steward.core.access import Caller, ScopeRefused, check_scope; "
            "from steward.daemon.registry import get_action; "
            "from steward.web.api.openapi import build_openapi_json; "
            f"reply = Client(config={config!r}).ask('bank.account_indebted', beyond=-500 * 10**6); "
            "document = json.loads(build_openapi_json('/api/v1')); "
            "action = get_action('bank.account_indebted'); "
            "caller = Caller(uid=1, scopes=frozenset({'bank'}))\n"
            "try: check_scope(caller, action.name, action.scope)\n"
            "except ScopeRefused as error: refusal = str(error)\n"
            "print(json.dumps({'accounts': [row.name for row in reply.accounts], "
            "'get': document['paths']['/indebted-accounts']['get'], "
            "'ask': '/ask/bank.account_indebted' in document['paths'], 'refusal': refusal}))",
        )
    )
    assert [row.split("|")[0] for row in rows.splitlines()] == facts["accounts"]
    assert set(facts["accounts"]) == {"chemistry", "optics"}, "physics has 996 SU"
    (parameter,) = facts["get"]["parameters"]
    assert parameter["description"] == "Only accounts that owe more than this. In micro-SU."
    assert facts["get"]["summary"] == "List accounts that owe service units."
    assert facts["ask"]
    assert "requires the scope 'read'" in facts["refusal"]
