"""Nothing of a checkpoint is executed, and nobody is asked whether it may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import add_tokenizer, by_magnitude, make_checkpoint, tokens, write_text

import slidesparse
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.meta_model import build_meta_model, model_class
from slidesparse.cli import main
from slidesparse.errors import CheckpointError, UnsupportedError
from slidesparse.offline.calibrate.calibration import load_tokenizer
from slidesparse.offline.evaluate import evaluate, load_any
from slidesparse.offline.prune import prune_checkpoint

KERNEL = "kernels-community/flash-attn2"


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody at the terminal would say yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def with_code(folder: Path, classes: str) -> Path:
    """Put a file into a checkpoint that leaves ``executed`` beside it when it runs."""
    (folder / "evil.py").write_text(
        f"import pathlib, transformers\npathlib.Path({str(folder / 'executed')!r}).touch()\n{classes}\n"
    )
    return folder


@pytest.fixture
def evil_config(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "m")
    add_tokenizer(tmp_path / "m")
    edit(tmp_path / "m/config.json", model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"})
    return with_code(tmp_path / "m", "class EvilConfig(transformers.LlamaConfig):\n    model_type = 'evil'")


@pytest.fixture
def evil_tokenizer(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "m")
    add_tokenizer(tmp_path / "m")
    edit(
        tmp_path / "m/tokenizer_config.json",
        tokenizer_class="EvilTokenizer",
        auto_map={"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]},
    )
    return with_code(tmp_path / "m", "class EvilTokenizer(transformers.PreTrainedTokenizerFast):\n    pass")


def test_a_config_with_code_is_refused_in_one_line(evil_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in (
        lambda: build_meta_model(Checkpoint(evil_config)),
        lambda: prune_checkpoint(evil_config, evil_config.parent / "s", by_magnitude("6:8", "int8")),
        lambda: load_any(Checkpoint(evil_config), torch.device("cpu")),
    ):
        with pytest.raises(UnsupportedError, match=r"code of its own; got model_type 'evil'.*custom code is not run"):
            run()
    assert main(["inspect", str(evil_config), "--json"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["error"]["remedy"] == "upgrade transformers; custom code is not run"
    assert "custom code is not run" in told.err
    assert len(told.err.splitlines()) == 1
    assert not (evil_config / "executed").exists()


def test_code_that_transformers_need_not_run_is_left_alone(tmp_path: Path) -> None:
    """Many checkpoints bring code that transformers has by now."""
    make_checkpoint(tmp_path / "m")
    edit(tmp_path / "m/config.json", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    with_code(tmp_path / "m", "C = M = None")
    load_any(Checkpoint(tmp_path / "m"), torch.device("cpu"))
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    slidesparse.load(tmp_path / "s")
    assert not (tmp_path / "m/executed").exists()
    assert not list((tmp_path / "s").rglob("*.py"))
    assert "auto_map" not in Checkpoint(tmp_path / "s").config


def test_a_tokenizer_with_code_is_refused_in_one_line(evil_tokenizer: Path) -> None:
    text = write_text(evil_tokenizer.parent / "text.txt", 60)
    for run in (lambda: load_tokenizer(evil_tokenizer), lambda: evaluate(evil_tokenizer, text=text)):
        with pytest.raises(CheckpointError, match=r"no tokenizer that can be loaded.*custom code is not run"):
            run()
    assert not (evil_tokenizer / "executed").exists()


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_no_attention_is_fetched_from_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    import transformers.modeling_utils

    fetched: list[str] = []
    monkeypatch.setattr(
        transformers.modeling_utils, "lazy_import_flash_attention", lambda name, *_, **__: fetched.append(name)
    )
    expected = make_checkpoint(tmp_path / "m", dtype=torch.float32)(tokens()).logits
    for asked in (KERNEL, {"": KERNEL}, "flash_attention_2", "eager"):
        edit(tmp_path / "m/config.json", **{key: asked})
        model = load_any(Checkpoint(tmp_path / "m"), torch.device("cpu"))
        torch.testing.assert_close(model(tokens()).logits, expected)
        assert model.config._attn_implementation == ("eager" if asked == "eager" else "sdpa")
        build_meta_model(Checkpoint(tmp_path / "m"))
    assert fetched == []


def test_nor_for_a_part_of_a_model(tmp_path: Path) -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.CLIPConfig(text_config=small, vision_config=small | {"image_size": 32, "patch_size": 16})
    transformers.CLIPModel(config).save_pretrained(tmp_path)
    edit(tmp_path / "config.json", _attn_implementation={"vision_config": KERNEL})
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert read.vision_config._attn_implementation == KERNEL
    _, read = model_class(Checkpoint(tmp_path))
    assert read.vision_config._attn_implementation is None
