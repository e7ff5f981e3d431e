"""What config.json says of a quantisation: followed as a whole, or refused by name, by every command alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import add_tokenizer, by_magnitude, make_checkpoint, make_w8a8, write_text
from safetensors.torch import load_file, save_file

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.marker import quantisation_dtype
from slidesparse.errors import CheckpointError
from slidesparse.models.config_keys import quantization_config
from slidesparse.offline.prune import prune_checkpoint

Config = dict[str, Any]
ROTATION = {"config_groups": {"R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}}
LAYERS = [f"re:.*{name}_proj" for name in ("q", "k", "v", "gate", "up", "down")]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``m`` in BF16, ``q`` in W8A8 without our mark, ``s`` pruned, and a text."""
    folder = tmp_path_factory.mktemp("quantised")
    make_checkpoint(folder / "m", num_hidden_layers=1)
    add_tokenizer(folder / "m")
    write_text(folder / "text.txt")
    prune_checkpoint(folder / "m", folder / "s", by_magnitude("6:8", "int8"))
    make_w8a8(folder / "m", folder / "q")
    return folder


def rewrite(folder: Path, change: Callable[[Config], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def copied(source: Path, folder: Path, change: Callable[[Config], object]) -> Path:
    shutil.copytree(source, folder)
    rewrite(folder, change)
    return folder


def put(*path: str, value: object) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        for key in path[:-1]:
            config = config.setdefault(key, {})
        config[path[-1]] = value

    return change


def within(*path: str, value: object) -> Callable[[Config], None]:
    return put("quantization_config", *path, value=value)


GROUP = ("config_groups", "group_0")

CHANGES_THE_RESULT: dict[str, Callable[[Config], None]] = {
    "transform_config": within("transform_config", value=ROTATION),
    "kv_cache_scheme": within("kv_cache_scheme", value={"num_bits": 8, "type": "float"}),
    "unheard_of": within("unheard_of", value=0),
    "group_0.output_activations": within(*GROUP, "output_activations", value={"num_bits": 8}),
    "group_0.weights.actorder": within(*GROUP, "weights", "actorder", value="group"),
    "group_0.input_activations.clip": within(*GROUP, "input_activations", "clip", value=0.9),
}


@pytest.mark.parametrize("name", CHANGES_THE_RESULT)
def test_what_changes_the_result_is_refused_by_name(sources: Path, tmp_path: Path, name: str) -> None:
    folder = copied(sources / "q", tmp_path / "m", CHANGES_THE_RESULT[name])
    with pytest.raises(CheckpointError) as error:
        Checkpoint(folder)
    assert name in str(error.value)
    assert error.value.remedy


HARMLESS: list[Callable[[Config], None]] = [
    within("transform_config", value={}),
    within("kv_cache_scheme", value=None),
    within("version", value="0.12.2"),
    within("format", value="naive-quantized"),
    within(*GROUP, "format", value=None),
    within(*GROUP, "weights", "group_size", value=-1),
    within(*GROUP, "weights", "actorder", value="static"),
    within(*GROUP, "input_activations", "zp_dtype", value=None),
]


@pytest.mark.parametrize("change", HARMLESS)
def test_what_changes_nothing_is_taken(sources: Path, tmp_path: Path, change: Callable[[Config], None]) -> None:
    assert quantisation_dtype(Checkpoint(copied(sources / "q", tmp_path / "m", change)).config) == torch.int8


@pytest.mark.parametrize("model", [0, 1])
def test_our_keys_are_those_of_compressed_tensors(model: int) -> None:
    """A release that has another key has to be looked at."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    from slidesparse.checkpoints.quantisation_keys import FORMAT, GROUP, PARTS, TOP

    for kind, known in ((QuantizationConfig, {**TOP, **FORMAT}), (QuantizationScheme, {**GROUP, **FORMAT})):
        assert kind.model_fields.keys() <= known.keys()
    for part in PARTS.values():
        assert QuantizationArgs.model_fields.keys() == part.keys()


def test_what_the_group_leaves_out_has_the_usual_value() -> None:
    config = quantization_config(torch.int8, [])
    for part in ("weights", "input_activations"):
        for key in ("num_bits", "type", "symmetric"):
            del config["config_groups"]["group_0"][part][key]
    assert quantisation_dtype({"quantization_config": config}) == torch.int8
    del config["config_groups"]["group_0"]["input_activations"]["dynamic"]
    with pytest.raises(CheckpointError, match=r"input_activations\.dynamic False; needed true"):
        quantisation_dtype({"quantization_config": config})


@pytest.mark.parametrize("targets", [["re:.*mlp.*"], ["Linear", "Conv1d"], ["lm_head"]])
def test_targets_of_other_kinds_are_not_ours(targets: list[str]) -> None:
    config = quantization_config(torch.int8, [])
    config["config_groups"]["group_0"]["targets"] = targets
    with pytest.raises(CheckpointError, match="whose target is Linear"):
        quantisation_dtype({"quantization_config": config})


def test_two_groups_are_not_ours() -> None:
    groups = [quantization_config(dtype, [])["config_groups"]["group_0"] for dtype in (torch.int8, torch.float8_e4m3fn)]
    config = {**quantization_config(torch.int8, []), "config_groups": dict(zip("ab", groups, strict=True))}
    with pytest.raises(CheckpointError, match="2 config_groups"):
        quantisation_dtype({"quantization_config": config})


@pytest.mark.parametrize(
    "left_over",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "mxfp4"},
        quantization_config(torch.float8_e4m3fn, []),
    ],
    ids=lambda value: str(value["quant_method"]),
)
def test_a_quantisation_that_no_tensor_has(sources: Path, tmp_path: Path, left_over: Config) -> None:
    folder = copied(sources / "m", tmp_path / "m", put("quantization_config", value=left_over))
    with pytest.raises(CheckpointError, match=r"all weights in BF16; remove quantization_config from config\.json"):
        prune_checkpoint(folder, tmp_path / "s", by_magnitude("6:8", "int8"))
    rewrite(folder, lambda config: config.pop("quantization_config"))
    prune_checkpoint(folder, tmp_path / "s", by_magnitude("6:8", "int8"))


def test_one_layer_in_floats(sources: Path, tmp_path: Path) -> None:
    folder = copied(sources / "q", tmp_path / "m", lambda config: None)
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.self_attn.o_proj"
    tensors[f"{name}.weight"] = torch.ones(64, 64)
    del tensors[f"{name}.weight_scale"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"leave it alone with --ignore {name}"):
        prune_checkpoint(folder, tmp_path / "s", by_magnitude("6:8"))
    prune_checkpoint(folder, tmp_path / "s", by_magnitude("6:8", ignore=(name,)))


@pytest.mark.parametrize("key", ["use_rms_norm", "modules_to_not_convert", "unheard_of"])
def test_keys_of_bitnet(tmp_path: Path, key: str) -> None:
    make_checkpoint(tmp_path / "m", "bitnet", num_hidden_layers=1)
    Checkpoint(tmp_path / "m")
    rewrite(tmp_path / "m", within(key, value=["model.layers.0.mlp.up_proj"]))
    with pytest.raises(CheckpointError, match=key):
        Checkpoint(tmp_path / "m")
