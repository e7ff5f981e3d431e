"""``slidesparse completion``: a script with which a shell completes commands, options and their values.

It is made from the parser, so it has every option that the command line has. Whatever is no known word is completed as
a file name. zsh runs the script of bash.
"""

from __future__ import annotations

import argparse
import json
from shlex import quote
from typing import Any

from slidesparse.cli.arguments import Commands, add_command

INSTALL = {
    "bash": 'eval "$(slidesparse completion bash)"  # in ~/.bashrc',
    "zsh": 'eval "$(slidesparse completion zsh)"  # in ~/.zshrc, after compinit',
    "fish": "slidesparse completion fish > ~/.config/fish/completions/slidesparse.fish",
}
"""Shell -> how its script is used; the script's first line."""

BASH = """_slidesparse() {
    local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command="" words="" index
    for ((index = 1; index < COMP_CWORD; index++)); do
        if [[ ${COMP_WORDS[index]} != -* ]]; then command="${COMP_WORDS[index]}"; break; fi
    done
    case "$command $before $current" in
CASES
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current" || true))
}
complete -o default -F _slidesparse slidesparse"""


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
    body = _fish(parser) if shell == "fish" else _bash(parser)
    zsh = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return f"# {INSTALL[shell]}\n{zsh}{body}"


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the commands of a parser, by name."""
    # argparse has no public way to list what a parser has; shtab and argcomplete take this one too.
    return next(dict(one.choices) for one in parser._actions if isinstance(one.choices, dict))


def _bash(parser: argparse.ArgumentParser) -> str:
    """Return a function with one case for each word before the cursor; the first that fits gives the words."""
    cases, commands = [], commands_of(parser)
    for name, command in commands.items():
        flags = [flag for one in command._actions for flag in one.option_strings]
        cases += [(f'"{name} {flag} "*', _choices(one)) for one in command._actions for flag in one.option_strings]
        cases.append((f'"{name} "*" -"*', flags))
        cases.append((f'"{name} "*', [w for one in command._actions if not one.option_strings for w in _choices(one)]))
    cases.append(('" "*', [*commands, "--help", "--version"]))
    lines = [f'        {case}) words="{" ".join(words)}" ;;' for case, words in cases if words]
    return BASH.replace("CASES", "\n".join(lines))


def _fish(parser: argparse.ArgumentParser) -> str:
    lines = []
    for name, command in commands_of(parser).items():
        lines.append(f"complete -c slidesparse -n __fish_use_subcommand -f -a {name} -d {_told(command.description)}")
        for one in command._actions:
            flags = "".join(f" -{'l' if flag[1] == '-' else 's'} {flag.lstrip('-')}" for flag in one.option_strings)
            words = f" -a {quote(' '.join(_choices(one)))}" if one.choices else ""
            value = (" -x" if words else " -r") if flags and one.nargs != 0 else ""
            text = _told(command._get_formatter()._expand_help(one) if one.help else "")
            when = f"'__fish_seen_subcommand_from {name}'"
            lines.append(f"complete -c slidesparse -n {when}{flags}{value}{words} -d {text}")
    return "\n".join(lines)


def _choices(option: Any) -> list[str]:
    return [str(choice) for choice in option.choices or ()]


def _told(text: str | None) -> str:
    """Return a text as one word of fish, where a backslash escapes inside of quotes too."""
    return "'" + (text or "").replace("\\", "\\\\").replace("'", "\\'") + "'"
