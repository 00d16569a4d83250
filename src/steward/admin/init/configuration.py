"""The configuration that a site's wishes come to, as text that people go on editing."""

from typing import Final

import msgspec

from steward.admin.init.wishes import DEFAULT_STATE, Site, Wishes
from steward.capture.settings import SensorSettings

_HEAD: Final = """\
# Made by 'steward init'. What else can be set: docs/configuration.md, steward.toml(5).
# 'steward config check' says whether it is right; 'systemctl reload steward' has it read again.
"""


_NO_URL: Final = '#url = "https://steward.example.org"\n'


def text_of(wishes: Wishes, site: Site) -> str:
    """The configuration, in TOML."""
    parts = [_HEAD]
    if wishes.state_dir != DEFAULT_STATE:
        parts.append(_line("state_dir", wishes.state_dir))
    parts.append(_cluster(wishes, site))
    parts.append("[archive.sink.files]\n" + _line("path", wishes.archive_dir))
    if wishes.nodes:
        parts.append("# What 'steward agent' on compute nodes sends.\n[nodes]\n")
        parts[-1] += _line("listen", wishes.nodes)
        if wishes.listener:
            parts[-1] += _line("listener", wishes.listener)
    if wishes.bank:
        parts.append("# It observes, and refuses nothing, until 'steward bank enforce gate'.\n")
        parts[-1] += "[bank]\nenabled = true\n"
    if wishes.sensor:
        parts.append(_sensor(wishes))
    parts.append("[actions]\n" + _line("programs_file", f"{wishes.out}/programs"))
    parts.append(
        "# Rules act on events; 'steward rules enable NAME' turns on one that comes with Steward.\n"
        f'[rules]\nenabled = false\ndirectories = ["{wishes.out}/rules.d"]\n'
    )
    if wishes.web:
        parts.append("[web]\n" + _line("listen", wishes.web))
        parts[-1] += "# URL of the pages in users' browsers; 'steward login' prints links to it.\n"
        parts[-1] += _line("url", wishes.web_url) if wishes.web_url else _NO_URL
    return "\n".join(parts)


def _cluster(wishes: Wishes, site: Site) -> str:
    lines = [f"[cluster.{wishes.cluster}]\n"]
    for name in ("slurm_conf", "slurm_bin"):
        value = getattr(site, name)
        if value:
            lines.append(_line(name, value))
    if wishes.jobcomp_lines:
        lines.append(_line("jobcomp_lines", wishes.jobcomp_lines))
    return "".join(lines)


def _sensor(wishes: Wishes) -> str:
    text = "[sensor]\nenabled = true\n"
    secret = f"{wishes.out}/trigger.secret"
    if secret != SensorSettings().secret_file:
        text += _line("secret_file", secret)
    return text


def _line(name: str, value: str) -> str:
    # JSON's strings are TOML's, but for DEL, which no path of ours holds.
    return f"{name} = {msgspec.json.encode(value).decode()}\n"
