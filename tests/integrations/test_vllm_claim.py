"""Which checkpoints and layers are ours, where shards begin, and what is told of them: without vLLM."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
import torch

from slidesparse.errors import CheckpointError, InputError, UnsupportedError
from slidesparse.files.marker import Marker
from slidesparse.integrations.vllm import parse_version
from slidesparse.integrations.vllm.names import (
    Claim,
    Options,
    claim,
    claims,
    left_to_vllm,
    members,
    renamed,
    shard_start,
)
from slidesparse.integrations.vllm.status import Ledger, Outcome
from slidesparse.integrations.vllm.warmup import Rehearsal, batches
from slidesparse.linear import SlideLinear
from slidesparse.packed import pack
from slidesparse.pattern import DENSE, Pattern
from slidesparse.prune import prune_mask

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
CT = {"quant_method": "compressed-tensors"}
MARKER = {"version": 1}
LOG = logging.getLogger("test")


@pytest.mark.parametrize(
    ("quantization", "user", "marker", "ours"),
    [
        (CT, None, MARKER, True),
        (CT, None, None, False),
        (CT, "slidesparse", None, True),
        (CT, "slidesparse", MARKER, True),
        (CT, "compressed-tensors", MARKER, False),  # the way to serve a sparse checkpoint dense
        ({"quant_method": "fp8"}, "slidesparse", None, False),
        ({}, None, MARKER, False),
    ],
)
def test_which_checkpoints_are_ours(quantization: dict[str, str], user: str | None, marker: object, ours: bool) -> None:
    assert claims(quantization, user, marker) is ours


def test_a_fused_layer_has_the_pattern_of_its_parts() -> None:
    name = "model.layers.3.self_attn.qkv_proj"
    assert members(name, FUSED) == [f"model.layers.3.self_attn.{part}_proj" for part in "qkv"]
    assert members("lm_head", FUSED) == ["lm_head"]
    assert claim(Marker(Pattern(6, 8)), name, FUSED) == Claim(name, Pattern(6, 8))
    alike = dict.fromkeys(members(name, FUSED), DENSE)
    assert claim(Marker(Pattern(6, 8), layers=alike), name, FUSED) == Claim(name, DENSE)


@pytest.mark.parametrize(
    "marker",
    [
        Marker(Pattern(6, 8), layers={"a.gate_proj": Pattern(4, 6)}),
        Marker(Pattern(6, 8), layers={"a.gate_proj": DENSE}),
        Marker(Pattern(6, 8), ignore=("a.up_proj",)),
    ],
)
def test_parts_of_a_fused_layer_must_agree(marker: Marker) -> None:
    with pytest.raises(CheckpointError, match=r"parts of a\.gate_up_proj.*gate_proj.*up_proj.*one pattern.*dense"):
        claim(marker, "a.gate_up_proj", FUSED)


def test_a_layer_left_alone_is_not_claimed_and_without_a_marker_the_weight_decides() -> None:
    assert claim(Marker(Pattern(6, 8), ignore=("a.gate_proj", "a.up_proj")), "a.gate_up_proj", FUSED) is None
    assert claim(None, "a.gate_up_proj", FUSED) == Claim("a.gate_up_proj", None)


def test_what_latent_attention_reads_as_a_matrix_is_left_to_vllm() -> None:
    assert "reads its weight as a matrix" in str(left_to_vllm("model.layers.0.self_attn.kv_b_proj"))
    for name in ("model.layers.0.self_attn.kv_a_proj_with_mqa", "model.layers.0.self_attn.q_b_proj", "a.kv_b_proj.b"):
        assert left_to_vllm(name) is None


def test_names_follow_vllm() -> None:
    marker = Marker(Pattern(6, 8), ("lm_head", "model.a"), {"model.b": Pattern(4, 6)})
    new = renamed(marker, {"model.a": "language_model.a", "model.b": "language_model.b", "lm_head": None})
    assert new.ignore == ("lm_head", "language_model.a")
    assert new.layers == {"language_model.b": Pattern(4, 6)}


def test_where_shards_begin_inside_a_group() -> None:
    # Qwen2.5-7B at tp = 2: o_proj and down_proj, the layers whose columns are shared out.
    assert [shard_start(1792, 3584, rank) % 6 for rank in range(2)] == [0, 4]
    assert [shard_start(9472, 18944, rank) % 6 for rank in range(2)] == [0, 4]
    assert [shard_start(9472, 18944, rank) % 10 for rank in range(2)] == [0, 2]
    assert shard_start(3584, 3584, 1) == 0  # a column-parallel layer has all of its columns on every rank


def test_options_are_read_strictly() -> None:
    assert Options.parse({}) == Options() == Options.parse(None)
    assert Options.parse({"slidesparse": {"backend": "cusparselt", "fallback": "none", "fuse": False}}) == Options(
        "cusparselt", "none", False
    )
    for wrong in ({"back": "auto"}, {"backend": "fast"}, {"fallback": "sparse"}, {"fuse": 1}, ["auto"]):
        with pytest.raises(InputError, match="additional-config"):
            Options.parse({"slidesparse": wrong})


class _Layer:
    """What a ledger keeps a weak reference of."""


SPARSE = Outcome(True, True, "6:8 by reference")
NO_PATTERN = Outcome(False, False, "its weight satisfies no pattern")


def test_the_ledger_speaks_once_after_the_last_layer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ledger, layers = Ledger(), [_Layer() for _ in range(3)]
    for i, layer in enumerate(layers):
        ledger.expect(f"model.layers.{i}.mlp.down_proj", layer)
    ledger.settle("model.layers.0.mlp.down_proj", SPARSE, LOG)
    ledger.settle("model.layers.1.mlp.down_proj", SPARSE, LOG)
    assert not caplog.messages
    ledger.settle("model.layers.2.mlp.down_proj", NO_PATTERN, LOG)
    assert caplog.messages == [
        "slidesparse: 2 of 3 layers run sparse",
        "slidesparse: model.layers.*.mlp.down_proj: sparse, 6:8 by reference (2 layers)",
        "slidesparse: model.layers.2.mlp.down_proj: dense, its weight satisfies no pattern",
    ]


def test_the_ledger_does_not_wait_for_a_layer_that_was_thrown_away(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ledger, kept, thrown = Ledger(), _Layer(), _Layer()
    ledger.expect("a", kept)
    ledger.expect("lm_head", thrown)
    del thrown
    ledger.settle("a", SPARSE, LOG)
    assert caplog.messages[0] == "slidesparse: 1 of 1 layers run sparse"


def test_a_start_up_that_leaves_all_eligible_layers_dense_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def settled(*outcomes: Outcome) -> list[str]:
        caplog.clear()
        ledger, layers = Ledger(), [_Layer() for _ in outcomes]
        for i, layer in enumerate(layers):
            ledger.expect(str(i), layer)
        for i, outcome in enumerate(outcomes):
            ledger.settle(str(i), outcome, LOG)
        return [record.message for record in caplog.records if record.levelno == logging.WARNING]

    left = Outcome(False, True, "6:8; not measured", eligible=True)
    told = "none of the 2 layers that could run sparse does (6:8; not measured)"
    (warning,) = settled(left, left, NO_PATTERN)
    assert told in warning
    assert "slidesparse tune" in warning
    assert """--additional-config '{"slidesparse": {"backend": "hopper"}}'""" in warning
    assert settled(left, Outcome(True, True, "6:8 by hopper", eligible=True)) == []
    assert settled(Outcome(False, True, "as the checkpoint says")) == []


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.22.1", (0, 22)),
        ("0.33rc1", (0, 33)),
        ("0.26.0rc2.dev13+g0a1b2c3.cu130", (0, 26)),
        ("0.19.1", (0, 19)),
        ("1.0", (1, 0)),
        ("0.1.dev123+g0a1b2c3", None),
        ("0.1.dev1", None),
        ("dev", None),
    ],
)
def test_versions_of_vllm(text: str, version: tuple[int, int] | None) -> None:
    assert parse_version(text) == version


def test_a_checkpoint_without_any_pattern_is_refused() -> None:
    ledger, layer = Ledger(), _Layer()
    ledger.expect("a", layer)
    with pytest.raises(UnsupportedError, match="no layer of this checkpoint satisfies any pattern"):
        ledger.settle("a", NO_PATTERN, LOG)


# -- rehearsal -----------------------------------------------------------------------------------------------------


def test_a_rehearsal_comes_by_every_route_and_skips_no_octave() -> None:
    found = batches(4096, (0, 17, 18, 5000))
    assert found == sorted(set(found))
    assert {1, 17, 18, 2048, 3072, 4096} <= set(found)
    assert all(0 < tokens <= 4096 for tokens in found)
    assert all(later <= 2 * former for former, later in pairwise(found))
    assert batches(1, ()) == [1]
    assert batches(2500, ())[-1] == 2500


def test_layers_of_a_kind_rehearse_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randint(-128, 128, (8, 16), dtype=torch.int8)
    packed = pack(weight * prune_mask(weight, "6:8"), "6:8", scale=torch.ones(8))
    layers = [SlideLinear(packed, backend=backend) for backend in ("reference", "reference", "dense")]
    ran: list[int] = []
    monkeypatch.setattr(SlideLinear, "forward", lambda _, x: ran.append(len(x)))
    rehearsal = Rehearsal(4, torch.bfloat16)
    for layer in layers:
        rehearsal.run(layer)
    assert ran == [1, 2, 3, 4] * 2
