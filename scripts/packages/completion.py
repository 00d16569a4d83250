"""Completion for bash, zsh and fish, generated from the command line: no program runs at a TAB."""

from collections.abc import Iterator
from typing import Final

from packages.shapes import DIRECTORIES, FILES, Argument, Option, Shape, below, sacct_fields

_HEAD: Final = "Completion of steward's commands and options. Made of the program itself."

_BASH: Final = r"""
_steward() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}
    local path=steward word at kind commands options arguments
    # "--option=value" comes in three words.
    if [[ $cur == = ]]; then
        cur=
    elif [[ $prev == = && $COMP_CWORD -gt 1 ]]; then
        prev=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    for ((at = 1; at < COMP_CWORD; at++)); do
        word=${COMP_WORDS[at]}
        _steward_value "$path" "$word"
        if [[ -n $kind ]]; then
            # What follows is its value, alone or behind "=".
            [[ ${COMP_WORDS[at + 1]} == = ]] && ((at++))
            ((at++))
        elif [[ $word != -* ]]; then
            _steward_is "$path $word" || break
            path+=" $word"
        fi
    done
    COMPREPLY=()
    _steward_value "$path" "$prev"
    if [[ -z $kind ]]; then
        _steward_words "$path"
        if [[ $cur == -* ]]; then
            kind="words $options"
        elif [[ -n $commands ]]; then
            kind="words $commands"
        else
            kind=$arguments
        fi
    fi
    case $kind in
    words*) mapfile -t COMPREPLY < <(compgen -W "${kind#words}" -- "$cur") ;;
    list*) # of words with commas between them
        local before=
        [[ $cur == *,* ]] && before=${cur%,*},
        mapfile -t COMPREPLY < <(compgen -P "$before" -W "${kind#list}" -- "${cur##*,}")
        compopt -o nospace
        ;;
    files)
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
        ;;
    directories)
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -d -- "$cur")
        ;;
    esac
}

complete -F _steward steward
"""

_FISH: Final = r"""
function __steward_path
    set -l path steward
    set -l value no
    for word in (commandline -opc)[2..]
        if test $value = yes
            set value no
            continue
        end
        contains -- "$path $word" $__steward_valued; and set value yes
        string match -q -- '-*' $word; and continue
        contains -- "$path $word" $__steward_paths; or break
        set path "$path $word"
    end
    echo $path
end

function __steward_at
    test (__steward_path) = "$argv"
end

complete -c steward -f
"""


def bash(whole: Shape) -> str:
    """Return the file for bash, which needs no bash-completion."""
    shapes = list(below(whole))
    paths = " | ".join(f'"{" ".join(shape.path)}"' for shape in shapes)
    lines = [f"# {_HEAD}", "", "_steward_is() {", "    case $1 in", f"    {paths}) return 0 ;;"]
    lines += ["    esac", "    return 1", "}", "", "_steward_words() {", "    case $1 in"]
    for shape in shapes:
        lines += [
            f'    "{" ".join(shape.path)}")',
            f'        commands="{" ".join(_last(one) for one in shape.commands)}"',
            f'        options="{" ".join(_names(shape))}"',
            f'        arguments="{_of_arguments(shape)}"',
            "        ;;",
        ]
    lines += [
        "    esac",
        "}",
        "",
        "# What may stand behind an option; nothing where it takes none.",
    ]
    lines += ["_steward_value() {", "    kind=", '    case "$1 $2" in']
    for shape in shapes:
        for option in shape.options:
            if option.value:
                typed = " | ".join(f'"{" ".join(shape.path)} {name}"' for name in option.names)
                lines.append(f'    {typed}) kind="{_kind(shape, option)}" ;;')
    lines += ["    esac", "}"]
    return "\n".join(lines) + "\n" + _BASH


def zsh(whole: Shape) -> str:
    """Return the file for zsh's fpath, ``_steward``."""
    lines = ["#compdef steward", f"# {_HEAD}", ""]
    for shape in below(whole):
        lines += [f"{_function(shape)}() {{", "    local context state state_descr line"]
        lines += ["    typeset -A opt_args", "    _arguments -s -C \\"]
        lines += [f"        {_quoted(spec)} \\" for spec in _zsh_options(shape)]
        if shape.commands:
            lines += ["        '1: :->command' \\", "        '*:: :->rest' && return"]
            lines += [
                "    case $state in",
                "    command)",
                "        local -a commands",
                "        commands=(",
            ]
            for one in shape.commands:
                lines.append(f"            {_quoted(f'{_last(one)}:{one.title}')}")
            lines += ["        )", "        _describe command commands", "        ;;", "    rest)"]
            lines.append("        case $words[1] in")
            lines += [f"        {_last(one)}) {_function(one)} ;;" for one in shape.commands]
            lines += ["        esac", "        ;;", "    esac"]
        else:
            lines += [f"        {_quoted(spec)} \\" for spec in _zsh_arguments(shape)]
            lines.append("        && return")
        lines += ["}", ""]
    return "\n".join([*lines, '_steward "$@"', ""])


def fish(whole: Shape) -> str:
    """Return the file for fish."""
    shapes = list(below(whole))
    paths = " ".join(_quoted(" ".join(shape.path)) for shape in shapes)
    valued = " ".join(
        _quoted(" ".join((*shape.path, name)))
        for shape in shapes
        for option in shape.options
        if option.value
        for name in option.names
    )
    lines = [f"# {_HEAD}", f"set -g __steward_paths {paths}", f"set -g __steward_valued {valued}"]
    rest = []
    for shape in shapes:
        at = f"complete -c steward -n {_fish_quoted('__steward_at ' + ' '.join(shape.path))}"
        rest += [f"{at} -a {_last(one)} -d {_fish_quoted(one.title)}" for one in shape.commands]
        rest += [f"{at} {_fish_option(shape, option)}" for option in shape.options]
        kind, _, words = _of_arguments(shape).partition(" ")
        if kind == "words":
            rest.append(f"{at} -a {_fish_quoted(words)}")
        elif kind:
            rest.append(f"{at} -F")
    return "\n".join(lines) + "\n" + _FISH + "\n".join(rest) + "\n"


def _last(shape: Shape) -> str:
    return shape.path[-1]


def _names(shape: Shape) -> list[str]:
    return [name for option in shape.options for name in option.names]


def _kind(shape: Shape, option: Option) -> str:
    """Return a value's kind: ``words a b``, ``list a b``, ``files``, ``directories`` or ``any``."""
    if option.choices:
        return f"words {' '.join(option.choices)}"
    if _last(shape) == "sacct" and "--format" in option.names:
        return f"list {' '.join(sacct_fields())}"
    if option.value in DIRECTORIES:
        return "directories"
    return "files" if option.value in FILES else "any"


def _of_arguments(shape: Shape) -> str:
    """Return the kind of a command's arguments: that of the first one with a kind."""
    for argument in shape.arguments:
        kind = _of_argument(argument)
        if kind:
            return kind
    return ""


def _of_argument(argument: Argument) -> str:
    if argument.choices:
        return f"words {' '.join(argument.choices)}"
    places = set(argument.name.split("|"))
    if places & set(DIRECTORIES) and not places & set(FILES):
        return "directories" if len(places) == 1 else "files"
    return "files" if any(place.startswith(("FILE", "EVENT.json")) for place in places) else ""


def _function(shape: Shape) -> str:
    return "_" + "_".join(shape.path).replace("-", "_")


def _zsh_options(shape: Shape) -> Iterator[str]:
    for option in shape.options:
        about = option.help.translate(_ZSH)
        value = f":{option.value.translate(_ZSH)}:{_zsh_action(_kind(shape, option))}"
        for name in option.names:
            # "--name=" takes "--name value" as well as "--name=value".
            equals = "=" if option.value and name.startswith("--") else ""
            yield f"*{name}{equals}[{about}]{value if option.value else ''}"


def _zsh_arguments(shape: Shape) -> Iterator[str]:
    for argument in shape.arguments:
        place = "*:" if argument.many else (":" if argument.required else "::")
        name = argument.name.translate(_ZSH)
        yield f"{place}{name}:{_zsh_action(_of_argument(argument))}"


def _zsh_action(kind: str) -> str:
    name, _, words = kind.partition(" ")
    if name == "words":
        return f"({words})"
    if name == "list":
        return f"_values -s , field {words}"
    return {"files": "_files", "directories": "_files -/"}.get(name, " ")


def _fish_option(shape: Shape, option: Option) -> str:
    words = [
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names
    ]
    if option.value:
        kind, _, choices = _kind(shape, option).partition(" ")
        words.append("-rF" if kind in ("files", "directories") else "-x")
        if kind == "list":
            words.append(f"-a {_fish_quoted(f'(__fish_append , {choices})')}")
        elif choices:
            words.append(f"-a {_fish_quoted(choices)}")
    return " ".join([*words, f"-d {_fish_quoted(option.help)}"])


_ZSH: Final = str.maketrans({"[": "\\[", "]": "\\]", ":": "\\:", "\n": " "})


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
