"""Make a script that lets a shell complete the options: ``horovodrun --completion SHELL``.

`launch` prints it; people put ``source <(horovodrun --completion bash)`` into their shell's start
file. The script is made from the parser, so it has every option, and it starts no Python when a key
is pressed. The shell completes the command behind the options as it would without horovodrun.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")

_PATHS = ("FILE", "DIR", "COMMAND", "PREFIX")  # names of arguments that are files

_BASH = """\
# For ~/.bashrc: source <(horovodrun --completion bash)
_horovodrun() {
    local cur=${COMP_WORDS[COMP_CWORD]} word index before=
    COMPREPLY=()
    for ((index = 1; index < COMP_CWORD; index++)); do
        word=${COMP_WORDS[index]}
        case $word in
            @WITH_TWO_VALUES@) ((index += 2)); before= ;;
            @WITH_VALUE@) ((index += 1)); before=$word ;;
            -*) before= ;;
            *)  # the command: completed as if it stood alone
                if declare -F _command_offset > /dev/null; then
                    _command_offset "$index"
                else
                    mapfile -t COMPREPLY < <(compgen -f -- "$cur")
                fi
                return ;;
        esac
    done
    if ((index == COMP_CWORD)); then before=; fi
    case $before in
        "") ;;
@CHOICES@
        @WITH_FILE@) mapfile -t COMPREPLY < <(compgen -f -- "$cur"); return ;;
        *) return ;;
    esac
    case $cur in
        -*) mapfile -t COMPREPLY < <(compgen -W "@FLAGS@" -- "$cur") ;;
        *) mapfile -t COMPREPLY < <(compgen -c -- "$cur") ;;
    esac
}
complete -o filenames -F _horovodrun horovodrun
"""

_ZSH = """\
#compdef horovodrun
# For ~/.zshrc, after compinit: source <(horovodrun --completion zsh)
_horovodrun() {
    _arguments \\
@SPECIFICATIONS@
        '(-)1:command:_command_names -e' \\
        '*::argument:_normal'
}
compdef _horovodrun horovodrun
"""

_FISH = """\
# For ~/.config/fish/config.fish: horovodrun --completion fish | source
@SPECIFICATIONS@
complete -c horovodrun -x -a '(__fish_complete_subcommand @WITH_VALUE@)'
"""


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for one of `SHELLS`."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](list(_options(parser))).rstrip("\n")


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            yield action


def _values(action: argparse.Action) -> int:
    """Return how many words after an option belong to it; none if its value is optional."""
    if "[" in _metavar(action)[:1]:
        return 0
    return 1 if action.nargs is None else int(action.nargs)


def _metavar(action: argparse.Action) -> str:
    return action.metavar if isinstance(action.metavar, str) else ""


def _is_path(action: argparse.Action) -> bool:
    return _metavar(action) in _PATHS


def _flags(actions: list[argparse.Action], separator: str) -> str:
    return separator.join(flag for action in actions for flag in action.option_strings)


def _summary(action: argparse.Action) -> str:
    """Return the beginning of an option's help, without characters that shells treat as syntax."""
    text = re.split(r"[.;:] |\.$| \(default", str(action.help).replace("%%", "%"))[0]
    return re.sub(r"[]\['\"`$:\\]", " ", text)


def _bash(options: list[argparse.Action]) -> str:
    choices = [
        f"        {_flags([action], '|')}) mapfile -t COMPREPLY < <(compgen -W "
        f'"{" ".join(action.choices)}" -- "$cur"); return ;;'
        for action in options
        if action.choices
    ]
    return (
        _BASH.replace("@WITH_TWO_VALUES@", _flags([a for a in options if _values(a) == 2], "|"))
        .replace("@WITH_VALUE@", _flags([a for a in options if _values(a) == 1], "|"))
        .replace("@WITH_FILE@", _flags([a for a in options if _is_path(a)], "|"))
        .replace("@CHOICES@", "\n".join(choices))
        .replace("@FLAGS@", _flags(options, " "))
    )


def _zsh(options: list[argparse.Action]) -> str:
    lines = []
    for action in options:
        value = f":{re.sub('[^A-Z]+', ' ', _metavar(action)).strip() or 'VALUE'}:" * _values(action)
        if action.choices:
            value += f"({' '.join(action.choices)})"
        elif _is_path(action):
            value += "_files"
        others = f"({' '.join(action.option_strings)})" if len(action.option_strings) > 1 else ""
        lines += [
            f"        '{others}{flag}[{_summary(action)}]{value}' \\"
            for flag in action.option_strings
        ]
    return _ZSH.replace("@SPECIFICATIONS@", "\n".join(lines))


def _fish(options: list[argparse.Action]) -> str:
    lines = []
    for action in options:
        kinds = [
            f"-l {flag[2:]}"
            if flag.startswith("--")
            else f"-{'s' if len(flag) == 2 else 'o'} {flag[1:]}"
            for flag in action.option_strings
        ]
        value = ""
        if action.choices:
            value = f" -x -a '{' '.join(action.choices)}'"
        elif _values(action):
            value = " -r" if _is_path(action) else " -x"
        lines.append(f"complete -c horovodrun {' '.join(kinds)} -d '{_summary(action)}'{value}")
    with_value = _flags([action for action in options if _values(action)], " ")
    return _FISH.replace("@SPECIFICATIONS@", "\n".join(lines)).replace("@WITH_VALUE@", with_value)
