"""``slidesparse completion``: a script with which a shell completes commands, options and their values.

It is made from the parser, so it has every option that the command line has. Whatever is no known word is completed as
a file name.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass

from slidesparse.cli.arguments import Commands, add_command

PROGRAM = "slidesparse"

INSTALL = {
    "bash": 'eval "$(slidesparse completion bash)"  # in ~/.bashrc',
    "zsh": 'eval "$(slidesparse completion zsh)"  # in ~/.zshrc, after compinit',
    "fish": "slidesparse completion fish > ~/.config/fish/completions/slidesparse.fish",
}
"""Shell -> how its script is used; the script's first line."""


@dataclass(frozen=True)
class Option:
    """An option, or an argument that has known values.

    Attributes:
        flags: ``--method``, ``-v``; none for an argument.
        text: Its help in one line.
        values: The words that it takes, where they are known.
        takes_value: Whether a value follows.
    """

    flags: tuple[str, ...]
    text: str
    values: tuple[str, ...]
    takes_value: bool


def add_completion(commands: Commands) -> None:
    """Add completion."""
    completion = add_command(commands, "completion", _completion, "Print a script that completes commands in a shell.")
    completion.add_argument("shell", choices=sorted(INSTALL), help="for which shell")


def _completion(options: argparse.Namespace) -> int:
    from slidesparse.cli import build_parser

    text = script(options.shell, build_parser())
    print(json.dumps(text) if options.json else text)
    return 0


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the script for a shell: ``bash``, ``zsh`` or ``fish``."""
    make = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]
    commands = {name: (one.description or "", _options(one)) for name, one in _commands(parser).items()}
    return f"{'#compdef slidesparse' if shell == 'zsh' else '# ' + INSTALL[shell]}\n{make(commands)}"


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    # argparse has no public way to list what a parser has; shtab and argcomplete take this one too.
    return next(dict(one.choices) for one in parser._actions if isinstance(one.choices, dict))


def _options(parser: argparse.ArgumentParser) -> list[Option]:
    formatter = parser._get_formatter()
    return [
        Option(
            tuple(action.option_strings),
            "" if action.help is None else formatter._expand_help(action),
            tuple(map(str, action.choices or ())),
            action.nargs != 0,
        )
        for action in parser._actions
    ]


Described = dict[str, tuple[str, list[Option]]]
"""Command -> its help and its options."""


def _bash(commands: Described) -> str:
    cases = []
    for name, (_, options) in commands.items():
        for one in options:
            if one.flags and one.values:
                cases += [f'        "{name} {flag}") words="{" ".join(one.values)}" ;;' for flag in one.flags]
    words = {name: " ".join(_flags(options)) for name, (_, options) in commands.items()}
    values = {name: " ".join(_arguments(options)) for name, (_, options) in commands.items()}
    flags = [f'        {name}) words="{text}" ;;' for name, text in words.items()]
    arguments = [f'        {name}) words="{text}" ;;' for name, text in values.items() if text]
    return f"""_{PROGRAM}() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="" words="" word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        if [[ $word != -* ]]; then command=$word; break; fi
    done
    case "$command $before" in
{_lines(cases)}
    esac
    if [[ -z $command ]]; then
        words="{" ".join(commands)} --help --version"
    elif [[ -z $words && $current == -* ]]; then
        case $command in
{_lines(flags)}
        esac
    elif [[ -z $words ]]; then
        case $command in
{_lines(arguments)}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current" || true))
}}
complete -o default -F _{PROGRAM} {PROGRAM}"""


def _zsh(commands: Described) -> str:
    named = [f"        {_quoted(f'{name}:{text}')}" for name, (text, _) in commands.items()]
    cases = []
    for name, (_, options) in commands.items():
        specs = [_zsh_spec(one, flag) for one in options for flag in one.flags or ("",)]
        cases.append(f"        {name}) _arguments -s {' '.join(map(_quoted, [*specs, '*:file:_files']))} ;;")
    return f"""_{PROGRAM}() {{
    local state line
    local -a commands=(
{_lines(named)}
    )
    _arguments -C '--help[show help]' '--version[show the version]' '1: :->command' '*:: :->arguments'
    case $state in
        command) _describe command commands ;;
        arguments) case $words[1] in
{_lines(cases)}
        esac ;;
    esac
}}
# {INSTALL["zsh"]}; or as a file _{PROGRAM} in $fpath
if [[ $funcstack[1] == _{PROGRAM} ]]; then _{PROGRAM} "$@"; else compdef _{PROGRAM} {PROGRAM}; fi"""


def _zsh_spec(option: Option, flag: str) -> str:
    """Return what zsh's ``_arguments`` calls a spec."""
    text = option.text.replace("\\", "\\\\").replace("[", r"\[").replace("]", r"\]").replace(":", r"\:")
    values = f"({' '.join(option.values)})" if option.values else "_files"
    if not flag:
        return f":{text}:{values}"
    return f"*{flag}[{text}]" + (f":value:{values}" if option.takes_value else "")


def _fish(commands: Described) -> str:
    lines = []
    for name, (text, options) in commands.items():
        lines.append(f"complete -c {PROGRAM} -n __fish_use_subcommand -f -a {name} -d {_escaped(text)}")
        here = f"complete -c {PROGRAM} -n '__fish_seen_subcommand_from {name}'"
        for one in options:
            names = "".join(f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}" for flag in one.flags)
            values = f" -a {_escaped(' '.join(one.values))}" if one.values else ""
            value = (" -x" if one.values else " -r") if one.flags and one.takes_value else ""
            if names or values:
                lines.append(f"{here}{names}{value}{values} -d {_escaped(one.text)}")
    return "\n".join(lines)


def _flags(options: Iterable[Option]) -> list[str]:
    return [flag for one in options for flag in one.flags]


def _arguments(options: Iterable[Option]) -> list[str]:
    return [value for one in options if not one.flags for value in one.values]


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """Return a text as one word of bash and zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


def _escaped(text: str) -> str:
    """Return a text as one word of fish, where a backslash escapes inside of quotes too."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
