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
