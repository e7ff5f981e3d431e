"""Tensors that do not fit: every command refuses them in one line that names the tensor, and inspect shows the rest."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import add_tokenizer, by_magnitude, edited_config, make_checkpoint, make_w8a8, write_text
from safetensors.torch import load_file, save_file

import slidesparse
from slidesparse.cli import main
from slidesparse.errors import CheckpointError, InputError
from slidesparse.offline.calibrate.calibration import Calibration
from slidesparse.offline.evaluate import evaluate
from slidesparse.offline.inspect import inspect_checkpoint
from slidesparse.offline.prune import PruneOptions, prune_checkpoint

Q = "model.layers.0.self_attn.q_proj"
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
Damage = Callable[[Tensors, Config], object]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    make_checkpoint(folder / "m", "llama", num_hidden_layers=1)
    add_tokenizer(folder / "m")
    write_text(folder / "text.txt", words=20)
    return folder / "m"


@pytest.fixture(scope="module")
def pruned(dense: Path) -> Path:
    prune_checkpoint(dense, dense.parent / "s", by_magnitude("6:8", "int8"))
    return dense.parent / "s"


@pytest.fixture(scope="module")
def quantised(dense: Path) -> Path:
    return make_w8a8(dense, dense.parent / "q")


def damaged(source: Path, folder: Path, damage: Damage) -> Path:
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    with edited_config(folder) as config:
        damage(tensors, config)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return lambda tensors, config: tensors.update({name: change(tensors[name]).contiguous()})


def with_row(row: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed[row] = value
        return changed

    return change


NAN = with_row(3, float("nan"))

SCALES: dict[str, tuple[Damage, str]] = {
    "NaN scale": (put(f"{Q}.weight_scale", NAN), f"{Q}.weight_scale holds NaN or Inf"),
    "int8 scale": (put(f"{Q}.weight_scale", lambda t: t.to(torch.int8)), f"type of {Q}.weight_scale; got I8"),
    "short scale": (
        put(f"{Q}.weight_scale", lambda t: t[1:]),
        f"shape of {Q}.weight_scale; got [63, 1]; needed [64, 1]",
    ),
    "no scale": (lambda tensors, _: tensors.pop(f"{Q}.weight_scale"), f"the checkpoint holds no {Q}.weight_scale"),
}

TENSORS: dict[str, tuple[Damage, str]] = {
    "long norm": (put(NORM, lambda t: torch.ones(65)), f"shape of {NORM}; got [65]; needed [64]"),
    "int norm": (put(NORM, lambda t: t.to(torch.int32)), f"type of {NORM}; got I32"),
    "NaN norm": (put(NORM, NAN), f"{NORM} holds NaN or Inf"),
    "Inf head": (put("lm_head.weight", with_row(3, float("inf"))), "lm_head.weight holds NaN or Inf"),
    "other vocabulary": (lambda _, config: config.update(vocab_size=80), f"shape of {EMBEDDING}; got [96, 64]"),
    "no norm": (lambda tensors, _: tensors.pop(NORM), f"got no {NORM}"),
    "no weight": (lambda tensors, _: tensors.pop(f"{Q}.weight"), f"got no {Q}.weight"),
}

MARKS: dict[str, tuple[Damage, str]] = {
    "ignored and quantised": (
        lambda _, config: config["slidesparse_config"]["ignore"].append(Q),
        f"type of {Q}.weight; got I8; needed BF16 or F16 or F32: slidesparse_config ignores the layer",
    ),
    "no quantization_config": (
        lambda _, config: config.pop("quantization_config"),
        "weight; got I8; needed BF16 or F16 or F32: config.json has no quantization_config",
    ),
    "float weight": (put(f"{Q}.weight", lambda t: t.float()), f"type of {Q}.weight; got F32; needed I8"),
    "ignored in one place": (
        lambda _, config: config["quantization_config"]["ignore"].append(Q),
        f"type of {Q}.weight; got I8; needed both configs to ignore the layer, or neither: quantization_config does,"
        " slidesparse_config does not",
    ),
}


@pytest.mark.parametrize("case", [*SCALES, *TENSORS, *MARKS])
def test_a_pruned_checkpoint_is_refused_and_shown(
    pruned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    damage, words = (SCALES | TENSORS | MARKS)[case]
    folder = damaged(pruned, tmp_path / "broken", damage)
    with pytest.raises(CheckpointError) as error:
        slidesparse.load(folder)
    assert words in str(error.value)
    capsys.readouterr()
    assert main(["inspect", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "self_attn.o_proj" in shown  # what is right is shown
    assert words.partition(";")[0].removesuffix(".weight") in shown.partition("PROBLEM: ")[2]


@pytest.mark.parametrize("case", [*SCALES, *TENSORS])
def test_a_source_is_refused_before_anything_is_written(
    dense: Path, quantised: Path, tmp_path: Path, case: str
) -> None:
    damage, words = (SCALES | TENSORS)[case]
    folder = damaged(quantised if case in SCALES else dense, tmp_path / "broken", damage)
    with pytest.raises(CheckpointError) as error:
        prune_checkpoint(folder, tmp_path / "out", by_magnitude("6:8", "int8"))
    assert words in str(error.value)
    assert not (tmp_path / "out").exists()
    if case not in ("NaN norm", "Inf head"):  # which only reading shows
        assert not (tmp_path / "out.partial").exists()
        with pytest.raises(CheckpointError) as error:
            evaluate(folder, text=dense.parent / "text.txt")
        assert words in str(error.value)


def test_a_stale_scale_of_a_float_weight(dense: Path, tmp_path: Path) -> None:
    folder = damaged(dense, tmp_path / "m", lambda t, _: t.update({f"{Q}.weight_scale": torch.ones(64, 1)}))
    for method, text in (("magnitude", None), ("wanda", Calibration(str(dense.parent / "text.txt")))):
        with pytest.raises(CheckpointError, match=r"q_proj.weight has a scale and is not quantised"):
            prune_checkpoint(folder, tmp_path / "s", PruneOptions("6:8", "int8", method, text))


def test_another_quantisation_is_named_and_not_the_weights_that_it_lacks(dense: Path, tmp_path: Path) -> None:
    """GPTQ and its kin have other tensors in the place of weights, which are not missing."""

    def quantise(tensors: Tensors, config: Config) -> None:
        tensors[f"{Q}.qweight"] = tensors.pop(f"{Q}.weight").to(torch.int32)
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4}

    folder = damaged(dense, tmp_path / "m", quantise)
    with pytest.raises(CheckpointError, match=r"^quantisation of the source; got gptq"):
        prune_checkpoint(folder, tmp_path / "s", by_magnitude("6:8", "int8"))
    with pytest.raises(CheckpointError, match="cannot load"):
        evaluate(folder, text=dense.parent / "text.txt")
    assert any("got gptq" in fault for fault in inspect_checkpoint(folder).faults)


@pytest.mark.parametrize(
    "wrong",
    [
        {"config_groups": ["not", "an object"]},
        {"config_groups": {"group_0": {"targets": ["Linear"], "weights": [8], "input_activations": {}}}},
        {"ignore": "lm_head"},
    ],
    ids=str,
)
def test_a_quantisation_of_the_wrong_kind(quantised: Path, tmp_path: Path, wrong: Config) -> None:
    folder = damaged(quantised, tmp_path / "m", lambda _, c: c["quantization_config"].update(wrong))
    with pytest.raises(CheckpointError, match=r"quanti[sz]ation"):
        prune_checkpoint(folder, tmp_path / "s", by_magnitude("6:8", "int8"))


def test_an_old_config_of_packed_bitnet_weights(dense: Path, tmp_path: Path) -> None:
    folder = damaged(dense, tmp_path / "m", lambda _, c: c.update(compression_config={"quant_method": "bitnet"}))
    with pytest.raises(CheckpointError, match="packed ternary weights"):
        prune_checkpoint(folder, tmp_path / "s", by_magnitude("6:8", "int8", rounding="ternary"))


# -- linears that servers join -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "others", "q", "told"),
    [
        ("int8", "6:8", "4:6", "4:6, .*k_proj: 6:8.*needed one pattern"),
        ("int8", "6:8", "dense", "dense, .*k_proj: 6:8"),
        ("int8", "6:8", None, "left alone, .*k_proj: 6:8.*or all left alone"),
        ("int8", "dense", None, "left alone, .*k_proj: dense"),  # in 8 bits, which q_proj would not have
        ("bf16", "6:8", None, "dense, .*k_proj: 6:8"),
        ("bf16", "dense", None, None),
    ],
)
def test_q_k_and_v_are_treated_alike(
    dense: Path, tmp_path: Path, dtype: str, others: str, q: str | None, told: str | None
) -> None:
    """vLLM refuses a checkpoint in which the parts of one of its layers are quantised and not."""
    layers = dict.fromkeys(("re:.*k_proj", "re:.*v_proj"), others) | ({"re:.*q_proj": q} if q else {})
    options = by_magnitude("6:8", dtype, layers=layers, ignore=() if q else ("re:.*q_proj",))
    if told is None:
        prune_checkpoint(dense, tmp_path / "s", options)
    else:
        with pytest.raises(InputError, match=f"different patterns; got {Q}: {told}"):
            prune_checkpoint(dense, tmp_path / "s", options)
        assert not list(tmp_path.iterdir())
    alike: Config = {"layers": dict.fromkeys((f"re:.*{name}_proj" for name in "qkv"), q)} if q else {}
    alone = alike or {"ignore": ("re:.*[qkv]_proj", "re:.*o_proj")}
    prune_checkpoint(dense, tmp_path / "t", by_magnitude("6:8", dtype, **alone))
