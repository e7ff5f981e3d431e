from __future__ import annotations

from typing import Any

import pytest
import torch

from slidesparse.checkpoints.marker import Marker, quantisation_dtype
from slidesparse.errors import CheckpointError
from slidesparse.models.config_keys import MARKER_KEY, quantization_config
from slidesparse.weights.pattern import Pattern

GOOD = {"version": 1, "pattern": "4:6", "ignore": ["lm_head"], "layers": {"a.b": "8:10", "c": "dense"}}


def test_round_trip() -> None:
    marker = Marker.from_config({MARKER_KEY: GOOD})
    assert marker.pattern_of("a.b") == Pattern(8, 10)
    assert marker.pattern_of("anything") == Pattern.parse("4:6")
    assert marker.to_config() == GOOD
    assert Marker.from_config({"architectures": ["X"]}) is None


def test_experts_have_a_version_of_their_own() -> None:
    value = {**GOOD, "version": 2, "experts": {"a.experts.*.up_proj": "6:8"}}
    marker = Marker.from_config({MARKER_KEY: value})
    assert marker.experts == {"a.experts.*.up_proj": Pattern(6, 8)}
    assert marker.to_config() == value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 3}, "version.*; upgrade slidesparse"),
        ({"version": None}, "version.*; make the checkpoint again"),
        ({"version": True}, "version"),
        ({"version": 2}, "lacks experts"),
        ({"version": 2, "experts": {"a": "8:6"}}, "8:6"),
        ({"extra": 1}, "unknown"),
        ({"pattern": None}, "pattern"),
        ({"pattern": "4:6@50%"}, "4:6@50%.*; prune the model again, at a pattern such as 6:8$"),
        ({"ignore": "lm_head"}, "ignore"),
        ({"layers": {"a": "8:6"}}, "8:6"),
    ],
)
def test_bad_marker_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        Marker.from_config({MARKER_KEY: {**GOOD, **change}})
    with pytest.raises(CheckpointError, match="lacks layers"):
        Marker.from_config({MARKER_KEY: {k: v for k, v in GOOD.items() if k != "layers"}})


def test_a_quantised_output_embedding_is_named_and_nothing_else_is() -> None:
    config = quantization_config(torch.int8, [], "lm_head")
    group = config["config_groups"]["group_0"]
    assert group["targets"] == ["Linear", "re:(.*[.])?lm_head$"]
    assert quantisation_dtype({"quantization_config": config}) == torch.int8
    for targets in (["Linear", "re:.*"], ["re:(.*[.])?lm_head$"], ["Linear", "lm_head", "re:(.*[.])?lm_head$"]):
        group["targets"] = targets
        with pytest.raises(CheckpointError, match="quantisation scheme of the source"):
            quantisation_dtype({"quantization_config": config})


def test_other_schemes_are_refused() -> None:
    wrong = {
        "weights": {"num_bits": 4, "strategy": "tensor", "symmetric": False},
        "input_activations": {"dynamic": False, "symmetric": False, "type": "float", "strategy": "tensor"},
    }
    for part, changes in wrong.items():
        for key, value in changes.items():
            config = quantization_config(torch.int8, [])
            config["config_groups"]["group_0"][part][key] = value
            with pytest.raises(CheckpointError, match="scheme"):
                quantisation_dtype({"quantization_config": config})
    for config in ({"quant_method": "gptq", "bits": 4}, {"quant_method": "modelopt", "quant_algo": "NVFP4"}):
        with pytest.raises(CheckpointError, match=f"; got {' '.join(map(str, config.values()))[:4]}"):
            quantisation_dtype({"quantization_config": config})
