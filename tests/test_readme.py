"""What the README says is run, or compared with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from checkpoints import add_tokenizer, make_checkpoint, write_text

from slidesparse.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for found, text in BLOCKS if found == language]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model and the text of the commands, in the folder where they run."""
    monkeypatch.chdir(tmp_path)
    make_checkpoint(tmp_path / "Qwen2.5-7B", "qwen2", max_position_embeddings=24)  # windows of 24 tokens, not of 2048
    add_tokenizer(tmp_path / "Qwen2.5-7B")
    write_text(tmp_path / "text.txt")


def test_prune_and_load_as_printed(source: None) -> None:
    prune = next(text for text in blocks("bash") if text.startswith("slidesparse prune"))
    for line in prune.splitlines():
        assert main(line.split()[1:]) == 0
    (load,) = (text for text in blocks("python") if "ss.load" in text)
    exec(load, {})


def test_prune_recover_and_round_as_printed(source: None) -> None:
    (commands,) = (text for text in blocks("bash") if "slidesparse recover" in text)
    small = commands.replace("--tokens 20M", "--tokens 2k --batch 96 --window 24 --eval-windows 2")
    for line in small.splitlines():
        assert main(line.split()[1:]) == 0


def block_of_the_quickstart(name: str) -> str:
    page = (ROOT / "docs/quickstart.md").read_text()
    (text,) = (text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if name in text)
    return text


def test_python_block_of_the_quickstart_runs() -> None:
    torch.manual_seed(0)
    exec(block_of_the_quickstart("ss.pack"), {})


def test_functions_of_the_quickstart_run(source: None) -> None:
    exec(block_of_the_quickstart("ss.evaluate").replace('"cuda"', '"cpu"'), {})
    exec(block_of_the_quickstart("calibration=tokens").replace("2048", "24"), {})
