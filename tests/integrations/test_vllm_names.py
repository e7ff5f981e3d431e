"""Which checkpoints and layers are ours, and where shards begin: without vLLM."""

from __future__ import annotations

import pytest

from slidesparse.checkpoints.marker import Marker
from slidesparse.errors import CheckpointError, UnsupportedError
from slidesparse.integrations.names import (
    NamedExperts,
    NamedLayer,
    find_layer,
    list_parts,
    marked_experts,
    shard_start,
)
from slidesparse.weights.pattern import DENSE, Pattern

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def test_a_fused_layer_has_the_pattern_of_its_parts() -> None:
    name = "model.layers.3.self_attn.qkv_proj"
    assert list_parts(name, FUSED) == [f"model.layers.3.self_attn.{part}_proj" for part in "qkv"]
    assert list_parts("lm_head", FUSED) == ["lm_head"]
    assert find_layer(Marker(Pattern(6, 8)), name, FUSED) == NamedLayer(name, Pattern(6, 8))
    alike = dict.fromkeys(list_parts(name, FUSED), DENSE)
    assert find_layer(Marker(Pattern(6, 8), layers=alike), name, FUSED) == NamedLayer(name, DENSE)


@pytest.mark.parametrize(
    "marker",
    [
        Marker(Pattern(6, 8), layers={"a.gate_proj": Pattern(4, 6)}),
        Marker(Pattern(6, 8), layers={"a.gate_proj": DENSE}),
        Marker(Pattern(6, 8), ignore=("a.up_proj",)),
    ],
)
def test_parts_of_a_fused_layer_must_agree(marker: Marker) -> None:
    with pytest.raises(CheckpointError, match=r"parts of a\.gate_up_proj.*gate_proj.*up_proj.*one pattern.*dense$"):
        find_layer(marker, "a.gate_up_proj", FUSED)


def test_a_layer_left_alone_is_not_claimed_and_without_a_marker_the_weight_decides() -> None:
    assert find_layer(Marker(Pattern(6, 8), ignore=("a.gate_proj", "a.up_proj")), "a.gate_up_proj", FUSED) is None
    assert find_layer(None, "a.gate_up_proj", FUSED) == NamedLayer("a.gate_up_proj", None)


@pytest.mark.parametrize(
    ("said", "patterns"),
    [
        ({"w1": "6:8", "w3": "6:8", "w2": "4:6"}, (Pattern(6, 8), Pattern(4, 6))),
        ({"gate_proj": "6:8", "up_proj": "6:8", "down_proj": "6:8"}, (Pattern(6, 8), Pattern(6, 8))),
        ({"gate_up_proj": "6:8", "down_proj": "2:4"}, (Pattern(6, 8), Pattern(2, 4))),
        ({"w1": "6:8", "w3": "4:6", "w2": "6:8"}, "not all of them were pruned to one pattern"),
        ({"w1": "6:8", "w2": "6:8"}, "not all of them were pruned to one pattern"),
        ({"gate_up_proj": "6:8"}, "not all of them were pruned to one pattern"),
        ({"gate_up_proj": "6:8", "down_proj": "dense"}, "one of their patterns is dense"),
    ],
)
def test_experts_have_the_patterns_that_the_marker_says(said: dict[str, str], patterns: object) -> None:
    experts = {f"a.1.mlp.experts.*.{leaf}": Pattern.parse(pattern) for leaf, pattern in said.items()}
    marker = Marker(Pattern(6, 8), experts=experts | {"a.11.mlp.experts.*.w1": DENSE})
    assert marked_experts(marker, "a.1.mlp.experts") == NamedExperts("a.1.mlp.experts", patterns)  # type: ignore[arg-type]


def test_experts_left_alone_are_not_searched_and_without_a_marker_the_weights_decide() -> None:
    assert marked_experts(Marker(Pattern(6, 8)), "a.mlp.experts") is None
    assert marked_experts(None, "a.mlp.experts") == NamedExperts("a.mlp.experts", None)


@pytest.mark.parametrize("place", [(None, None), (1, 3)])
def test_a_shard_whose_place_is_unknown_is_refused(place: tuple[int | None, int | None]) -> None:
    assert shard_start("o_proj", 64, 64, *place) == 0
    assert shard_start("o_proj", 32, 64, 1, 2) == 32
    with pytest.raises(UnsupportedError, match="got 32 of 64 columns"):
        shard_start("o_proj", 32, 64, *place)
