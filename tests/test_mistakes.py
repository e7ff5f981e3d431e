"""Mistakes on the command line: one line, whatever they are, and nothing on the disk has changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import add_tokenizer, make_checkpoint, write_text
from no_gpu import too_old

from slidesparse.cli import main

PRUNE = ["prune", "m", "s", "--pattern", "6:8", "--method", "magnitude"]
WANDA = [*PRUNE, "--method", "wanda", "--calibration", "text.txt", "--samples", "2", "--length", "16"]
EVAL = ["eval", "m", "--text", "text.txt"]

COMMANDS = {
    **{f"prune on {device}": [*PRUNE, "--device", device] for device in ("CPU", "mps", "cuda:-1", "", "meta")},
    **{"wanda on cuda:99": [*WANDA, "--device", "cuda:99"], "eval on cuda:99": [*EVAL, "--device", "cuda:99"]},
    "eval on foo": [*EVAL, "--device", "foo"],
    **{f"seed {seed}": [*WANDA, "--seed", seed] for seed in ("-1", "9" * 400)},
    "destination in bytes": [*PRUNE[:2], "caf\udce9", *PRUNE[3:]],
    "text in bytes": [*EVAL, "--text", "caf\udce9.txt"],
    "inspect bytes": ["inspect", "caf\udce9"],
    "loop as destination": [*PRUNE[:2], "loop", *PRUNE[3:]],
    "loop as source": ["prune", "loop", *PRUNE[2:]],
    "deep records": ["report", "deep.json", "--out", "r"],
    "long number": ["report", "long.json", "--out", "r"],
    "list as text": [*WANDA, "--calibration", "numbers.json"],
}
# As a shell makes of a variable that is not set; an empty Path would be the folder that one is in.
EMPTY = [
    *([*PRUNE[:at], "", *PRUNE[at + 1 :]] for at in (1, 2)),
    *([*WANDA, "--calibration", ""], ["eval", "", *EVAL[2:]], [*EVAL, "--text", ""], ["inspect", ""]),
    *(["bench", "gemm", "--out", ""], ["bench", "serve", "--out", "r.jsonl", "--scratch", ""]),
    *(["report", "", "--out", "r"], ["report", "text.txt", "--out", ""]),
]
NO_GPU = [
    *(PRUNE, [*PRUNE, "--dry-run"], WANDA, EVAL, ["chats", "m", "c.jsonl", "--count", "2"]),
    ["recover", "m", "r", "--dense", "m", "--tokens", "1M", "--text", "text.txt"],
]
ONE_LINE = [
    *(pytest.param(words, "", id=name) for name, words in COMMANDS.items()),
    *(pytest.param(words, "got an empty path; needed the name", id=" ".join(words)) for words in EMPTY),
    *(pytest.param([*words, "--device", "cuda"], "no CUDA device here; got", id=" ".join(words)) for words in NO_GPU),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mistakes")
    make_checkpoint(made / "m", num_hidden_layers=1)
    add_tokenizer(made / "m")
    write_text(made / "text.txt", words=60)
    (made / "loop").symlink_to("loop")
    (made / "deep.json").write_text("[" * 100_000 + "\n")
    (made / "long.json").write_text(f'{{"version": {"1" * 5000}}}')
    (made / "numbers.json").write_text("[1, 2]")
    return made


def listed(folder: Path) -> dict[str, tuple[int, int]]:
    found = [path for path in sorted(folder.rglob("*")) if not path.is_symlink()]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


@pytest.mark.parametrize(("words", "says"), ONE_LINE)
def test_a_mistake_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    before = listed(folder)
    capsys.readouterr()
    try:
        status = main([*words, "--json"])
    except SystemExit as stop:  # a value that argparse refuses
        status = int(str(stop.code))
    told = capsys.readouterr()
    error = json.loads(told.out)["error"]
    assert error["kind"] in ("InputError", "CheckpointError", "UnsupportedError", "UsageError")
    assert says in error["message"]
    assert status == 2 or (status, told.err.count("\n")) == (1, 1)
    told.err.encode("utf-8", "backslashreplace")
    assert listed(folder) == before


CONFIGS: dict[str, Callable[[dict[str, object]], object]] = {
    "unknown family": lambda c: c.update(model_type="nothing"),
    "text as size": lambda c: c.update(hidden_size="sixty-four"),
    "no heads": lambda c: c.update(num_attention_heads=0),
    "no architectures": lambda c: c.update(architectures=None),
    "unknown architecture": lambda c: c.update(architectures=["NoSuchModel"]),
    "list as architectures": lambda c: c.update(architectures=[["LlamaForCausalLM"]]),
    "list as quantization_config": lambda c: c.update(quantization_config=[1]),
    "number as auto_map": lambda c: c.update(auto_map=3),
    "text as dtype": lambda c: c.update(dtype="nothing"),
    "more words": lambda c: c.update(vocab_size=97),
}


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("command", ["inspect", "prune", "eval"])
def test_a_wrong_config_is_one_line(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    name: str,
) -> None:
    words = {"inspect": ["inspect", "m"], "prune": PRUNE, "eval": EVAL}[command]
    (tmp_path / "m").mkdir()
    for file in (folder / "m").iterdir():
        (tmp_path / "m" / file.name).symlink_to(file)
    (tmp_path / "text.txt").symlink_to(folder / "text.txt")
    config = json.loads((folder / "m/config.json").read_text())
    CONFIGS[name](config)
    (tmp_path / "m/config.json").unlink()
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    before = listed(tmp_path)
    capsys.readouterr()
    assert main(words) == 1
    told = capsys.readouterr()
    assert "PROBLEM" in told.out or (told.out == "" and told.err.count("\n") == 1)
    assert "unexpected error" not in told.err
    assert listed(tmp_path) == before
