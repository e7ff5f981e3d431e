"""Shell completion: what bash offers, and that no command, option or value of the command line is missing."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from slidesparse.cli import build_parser, completion, main

SHELLS = sorted(completion.INSTALL)


def offered(*words: str) -> list[str]:
    """What bash completes the last word with, before it turns to file names."""
    script = completion.script("bash", build_parser())
    ask = f"COMP_WORDS=({' '.join(f'{w!r}' for w in words)}); COMP_CWORD={len(words) - 1}; _slidesparse"
    lines = f'{script}\n{ask}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "--norc", "-euc", lines], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["slidesparse", "p"], ["prune"]),
        (["slidesparse", "--v"], ["--version"]),
        (["slidesparse", "prune", "--dr"], ["--dry-run"]),
        (["slidesparse", "prune", "--method", ""], ["magnitude", "sparsegpt", "wanda"]),
        (["slidesparse", "prune", "m", "q", "--recipe", "t"], ["ternary"]),
        (["slidesparse", "-v", "completion", ""], ["bash", "fish", "zsh"]),
        (["slidesparse", "prune", "./"], []),
        (["slidesparse", "prune", "--pattern", "f"], []),
        (["slidesparse", "none", "-"], []),
    ],
)
def test_what_bash_offers(words: list[str], expected: list[str]) -> None:
    assert offered(*words) == expected


def test_file_names_come_where_no_word_is_known() -> None:
    """``compgen`` and ``complete`` of bash itself: the function is registered, with file names where it has nothing."""
    script = completion.script("bash", build_parser())
    command = ["bash", "--norc", "-euc", f"{script}\ncomplete -p slidesparse"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["complete", "-o", "default", "-F", "_slidesparse", "slidesparse"]


@pytest.mark.parametrize("shell", SHELLS)
def test_nothing_of_the_parser_is_missing(shell: str) -> None:
    script = completion.script(shell, build_parser())
    commands = completion.commands_of(build_parser())
    assert {"prune", "completion", "tune"} < set(commands)
    for name, parser in commands.items():
        lines = [line for line in script.splitlines() if name in line]
        for option in parser._actions:
            for flag in option.option_strings:
                spelt = f"-l {flag[2:]} " if flag.startswith("--") else f"-s {flag[1:]} "
                assert any((spelt if shell == "fish" else flag) in line for line in lines), (name, flag)
            for value in option.choices or ():
                assert str(value) in script
    assert "%(default)s" not in script


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_reads_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert main(["completion", shell, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) + "\n" == script
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", "/dev/stdin"], input=script, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
