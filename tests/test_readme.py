"""What the README says is run, or compared with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from checkpoints import add_tokenizer, make_checkpoint, write_text

from slidesparse.cli import main
from slidesparse.weights.pattern import Pattern

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for found, text in BLOCKS if found == language]


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 120


def test_prune_and_load_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_checkpoint(tmp_path / "Qwen2.5-7B", "qwen2")
    (prune,) = (text for text in blocks("bash") if text.startswith("slidesparse prune"))
    for line in prune.splitlines():
        assert main(line.split()[1:]) == 0
    (load,) = (text for text in blocks("python") if "ss.load" in text)
    exec(load, {})


def test_plan_prune_and_eval_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_checkpoint(tmp_path / "Qwen2.5-7B", "qwen2", max_position_embeddings=24)  # windows of 24 tokens, not of 2048
    add_tokenizer(tmp_path / "Qwen2.5-7B")
    write_text(tmp_path / "text.txt")
    write_text(tmp_path / "held-out.txt", words=30)
    (commands,) = (text for text in blocks("bash") if text.startswith("slidesparse plan"))
    for line in commands.splitlines():
        assert main(line.split()[1:]) == 0


def test_python_block_runs() -> None:
    (text,) = (text for text in blocks("python") if "ss.pack" in text)
    torch.manual_seed(0)
    exec(text, {})


def test_commands_exist() -> None:
    for command in re.findall(r"^slidesparse (\w+)|`slidesparse (\w+)", README, re.MULTILINE):
        with pytest.raises(SystemExit) as stop:
            main([command[0] or command[1], "--help"])
        assert stop.value.code == 0


@pytest.mark.parametrize(("pattern", "share"), [("4:6", "0.83"), ("6:8", "0.94"), ("8:10", "1.00")])
def test_memory_figures(pattern: str, share: str) -> None:
    assert f"{float(Pattern.parse(pattern).bytes_per_weight('2:4')):.2f}" == share
    assert f"{share} of dense 8-bit at {pattern}" in README or f"{share} at {pattern}" in README


def test_as_many_architectures_as_the_page_has() -> None:
    page = (ROOT / "docs/models.md").read_text()
    rows = page[page.index("<!-- models -->") : page.index("<!-- end -->")].splitlines()
    treated = sum(row.count("`") // 2 for row in rows if "| refused |" not in row)
    assert f"about {round(treated, -1)} architectures" in README


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_accuracy_figures_are_those_of_the_tables() -> None:
    tables, words = (ROOT / "results/accuracy/tables.md").read_text(), " ".join(README.split())
    perplexity = tables[tables.index("30 M parameters: perplexity of held-out packages") :].splitlines()

    def means(start: str, lines: list[str]) -> list[float]:
        cells = next(line for line in lines if line.startswith(start)).split("|")[2:]
        return [float(cell.split()[0]) for cell in cells if cell.strip()[:1] == "+"]

    rows = [means(f"| {pattern} |", perplexity) for pattern in ("6:8", "4:6", "2:4")]
    plan = means("| 1.200x | plan |", tables.splitlines())
    assert [[f"{value:.1f}" for value in row[2:4]] for row in rows] == [["0.5", "0.4"], ["1.3", "1.0"], ["5.9", "4.3"]]
    assert "6:8 raises the perplexity of packages that it never saw by 0.5 %, 4:6 by 1.3 % and 2:4 by 5.9 %" in words
    assert [f"{row[0]:.0f}" for row in rows] == ["2", "5", "31"]
    assert "by magnitude 2, 5 and 31 %" in words
    assert f"A plan foretold at 1.2x loses {plan[0]:.2f} %" in words
    larger = tables[tables.index("101 M parameters: perplexity of held-out packages") :].splitlines()
    matched = [f"{means(f'| {pattern} |', larger)[2]:.1f}" for pattern in ("6:8", "4:6", "2:4")]
    assert "one of 101 M (one seed) loses {}, {} and {} %".format(*matched) in words
    smaller = means("| 1.167x | trained with 12 layers |", tables.splitlines())
    assert f"would be as fast as 4:6 and loses {smaller[0]:.1f} %" in words
    assert f"makes that 0.4, 1.0, 4.3 and {plan[1]:.2f} %" in words
