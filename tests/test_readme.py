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


def test_compress_as_printed(source: None, tmp_path: Path) -> None:
    (command,) = (text for text in blocks("bash") if text.startswith("slidesparse compress"))
    (tmp_path / "Qwen2.5-7B").rename("Qwen2.5-7B-Instruct")
    Path("Qwen2.5-7B-Instruct/chat_template.jinja").write_text(
        "{% for one in messages %}{{ one.content }} {% endfor %}"
    )
    Path("prompts.txt").write_text("\n".join(f"Why {number}?" for number in range(64)))
    assert main(command.replace("--minutes 60", "--minutes 0.4").split()[1:]) == 0
    assert "| perplexity | " in Path("compressed/report.md").read_text()


def test_the_parts_of_the_recipe_as_printed(source: None) -> None:
    page = (ROOT / "docs/recipe.md").read_text()
    (commands,) = (text for text in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "slidesparse recover" in text)
    small = commands.replace("--tokens 20M", "--tokens 2k --batch 96 --window 24 --eval-windows 2").replace("\\\n", " ")
    small = small.replace("Qwen/Qwen2.5-Coder-0.5B-Instruct", "Qwen2.5-7B").replace("chats.jsonl", "text.txt")
    small = small.replace("--match-steps 200", "--match-steps 2").replace("held-out", "text")
    for line in small.splitlines():
        if not line.startswith("slidesparse chats"):
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
