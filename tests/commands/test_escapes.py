"""What a checkpoint says reaches neither terminal nor log nor model card as anything that a terminal acts on."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import add_tokenizer, make_checkpoint, prune_words, write_text
from safetensors.torch import load_file, save_file

import slidesparse
from slidesparse.base.log import LOG, log_once
from slidesparse.base.progress import table
from slidesparse.cli import main
from slidesparse.errors import InputError, SlideSparseWarning

EVIL = "\x1b[2J\x07\x9b31m\x7f\u202e\u2066\r\b"
WRITTEN = r"\u001b[2J"


def is_drawn(text: str) -> bool:
    return all(sign.isprintable() or sign == "\n" for sign in text)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A checkpoint whose every name that may be anything is evil, and that can be pruned."""
    folder = tmp_path / "m"
    make_checkpoint(folder, num_hidden_layers=1)
    add_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, f"model.{EVIL}.weight": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    (folder / f"{EVIL}.txt").write_text("text")
    (folder / f"{EVIL}.bin").write_text("weights")
    (folder / f"link{EVIL}").symlink_to("/etc/hostname")
    write_text(tmp_path / f"{EVIL}.txt", words=60)
    return folder


def test_a_checkpoint_with_evil_names_is_pruned(evil: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, text = evil.parent / "out", str(evil.parent / f"{EVIL}.txt")
    calibrated = ["--method", "wanda", "--calibration", text, "--samples", "2", "--length", "16"]
    prune = prune_words(evil, out, "--dtype", "int8", "--links", "skip", *calibrated)
    capfd.readouterr()
    for words in ([*prune, "--dry-run"], prune, ["inspect", str(evil)], ["eval", str(evil), "--text", text]):
        assert main(words) == 0
        told = capfd.readouterr()
        assert is_drawn(told.out), repr(told.out)
        assert is_drawn(told.err), repr(told.err)
        assert WRITTEN in told.out or words[0] == "inspect"
    card = (out / "README.md").read_text()
    assert is_drawn(card), repr(card)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SlideSparseWarning)
        slidesparse.load(out)
    told_of = [str(one.message) for one in caught if issubclass(one.category, SlideSparseWarning)]
    assert any(WRITTEN in line for line in told_of)
    assert all(line.isprintable() for line in told_of)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": [EVIL]},
        {"model_type": EVIL},
        {"hidden_size": EVIL},
        {"hidden_act": EVIL},
        {EVIL: 2**40},
        {"x": f"re:({EVIL}"},
        {"quantization_config": {"quant_method": EVIL}},
        {"quantization_config": {"quant_method": "compressed-tensors", EVIL: EVIL, "config_groups": {EVIL: EVIL}}},
    ],
    ids=lambda changes: json.dumps(changes)[:40],
)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_config_with_evil_values(
    evil: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any], options: list[str]
) -> None:
    edit(evil / "config.json", **changes)
    capfd.readouterr()
    main(prune_words(evil, evil.parent / "o", "--dtype", "int8", *options))
    told = capfd.readouterr()
    assert is_drawn(told.out), repr(told.out)
    assert is_drawn(told.err), repr(told.err)
    assert not options or json.loads(told.out)


def test_a_template_error(evil: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (evil / "chat_template.jinja").write_text(f"{{{{ raise_exception('{EVIL}') }}}}")
    chats = evil.parent / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "what"}]}))
    capfd.readouterr()
    assert main(["eval", str(evil), "--text", str(chats)]) == 1
    told = capfd.readouterr().err
    assert "chat template fails" in told
    assert is_drawn(told), repr(told)


def test_the_doors(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    assert str(InputError(EVIL, got=f"{EVIL}\n{EVIL}")).isprintable()
    assert len(str(InputError("a" * 10**6, remedy="the end"))) < 2100
    assert str(InputError("a" * 10**6, remedy="the end")).endswith("the end")
    LOG.warning("%s\nslidesparse: forged", EVIL)
    log_once.cache_clear()
    log_once(EVIL, logging.WARNING)
    for record in caplog.records:
        assert record.getMessage().isprintable()
    assert len(caplog.records) == 2
    assert is_drawn(table(["a"], [[EVIL]]))
    assert main(["inspect", EVIL]) == 1
    assert is_drawn(capsys.readouterr().err)
