"""Shell completion: a script of shtab's for each shell, and one line where shtab is missing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from slidesparse.cli import main


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_the_shell_reads_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert main(["completion", shell, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) + "\n" == script
    assert "dry-run" in script
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", "/dev/stdin"], input=script, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["slidesparse", "pru"], "prune"),
        (["slidesparse", "prune", "--dry"], "--dry-run"),
        (["slidesparse", "prune", "--method", "s"], "sparsegpt"),
    ],
)
def test_what_bash_offers(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    ask = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_slidesparse"
    lines = f'{capsys.readouterr().out}\n{ask}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "--norc", "-c", lines], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, [expected])


def test_without_shtab_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert capsys.readouterr().err == "slidesparse: shtab is not installed; pip install shtab\n"
