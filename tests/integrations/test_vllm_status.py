"""What is logged of a model's layers, and when: without vLLM."""

from __future__ import annotations

import logging

import pytest
import torch

from slidesparse.errors import UnsupportedError
from slidesparse.integrations.gain import LoadedLinear
from slidesparse.integrations.vllm.status import LACKED, ModelStatus, Outcome

LOG = logging.getLogger("test")


class _Layer:
    """What a status keeps a weak reference of."""


SPARSE = Outcome(True, True, "6:8 by reference")
NO_PATTERN = Outcome(False, False, "its weight satisfies no pattern")


def test_the_status_is_told_once_after_the_last_layer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    status, layers = ModelStatus(), [_Layer() for _ in range(3)]
    for i, layer in enumerate(layers):
        status.expect_layer(f"model.layers.{i}.mlp.down_proj", layer)
    status.note_outcome("model.layers.0.mlp.down_proj", SPARSE, LOG)
    status.note_outcome("model.layers.1.mlp.down_proj", SPARSE, LOG)
    assert not caplog.messages
    status.note_outcome("model.layers.2.mlp.down_proj", NO_PATTERN, LOG)
    assert caplog.messages == [
        "slidesparse: 2 of 3 layers run sparse",
        "slidesparse: model.layers.*.mlp.down_proj: sparse, 6:8 by reference (2 layers)",
        "slidesparse: model.layers.2.mlp.down_proj: dense, its weight satisfies no pattern",
    ]


def linear(out: int, times: dict[int, tuple[float, float]] | None = None) -> Outcome:
    """One that runs on packed weights, or dense without times."""
    return Outcome(times is not None, True, "6:8", linear=LoadedLinear((out, 64), times or {}))


def gained(*outcomes: Outcome, layers: int = 1) -> list[str]:
    """What a model with so many layers of each outcome says that it gains."""
    status = ModelStatus()
    status.outcomes = {f"{i}.{layer}": outcome for i, outcome in enumerate(outcomes) for layer in range(layers)}
    return [line for line in status.describe() if " of dense's time for " in line]


TIMES = {16: (1.0, 2.0)}
HERE = "slidesparse: by times measured here"


@pytest.mark.parametrize(
    ("layers", "outcomes", "said"),
    [
        (  # the sums over all linears, dense ones too, where each has a time: 10 of 14, 13 of 16
            28,
            [
                linear(32, {16: (6.0, 10.0), 64: (9.0, 12.0), 100: (1.0, 1.0)}),
                linear(8, {16: (4.0, 4.0), 64: (4.0, 4.0), 100: (1.0, 1.0), 1024: (1.0, 1.0)}),
                Outcome(True, True, "6:8"),  # measured by another unit
            ],
            f"{HERE} the linears take 0.71 of dense's time for 16 tokens, 0.81 for 64",
        ),
        (1, [linear(32, TIMES), linear(32)], f"{HERE} the linears take 0.75 of"),  # as dense as one of its shape
        (2, [linear(32, TIMES), linear(8)], f"{HERE} 2 of 4 linears take 0.50 of"),
        (1, [linear(32, TIMES), linear(8, {64: (1.0, 2.0)})], None),  # no number of tokens is known of both
    ],
)
def test_a_start_says_what_is_gained(layers: int, outcomes: list[Outcome], said: str | None) -> None:
    found = gained(*outcomes, layers=layers)
    assert len(found) == (said is not None)
    assert said is None or found[0].startswith(said)


def test_a_part_of_a_model_without_any_pattern_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """With pipeline parallelism another process may hold all layers that were pruned."""
    with pytest.raises(UnsupportedError, match="no layer of this checkpoint satisfies any pattern"):
        ModelStatus().note_outcome("model.layers.1.mlp.down_proj", NO_PATTERN, LOG)
    ModelStatus(part=True).note_outcome("model.layers.1.mlp.down_proj", NO_PATTERN, LOG)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == (
        "slidesparse: none of the 1 layers in this stage of the pipeline satisfies any pattern: it runs dense"
    )


@pytest.mark.parametrize("joined", [False, True])
def test_layers_without_a_kernel_of_vllms_are_not_called_vllms_own(joined: bool) -> None:
    status = ModelStatus()
    status.outcomes = {"a.b": Outcome(False, True, "ampere: NVRTC is too old", joined=joined, how=LACKED)}
    total, layer = status.describe()
    assert total == f"slidesparse: nothing is sparse: 1 of 1 layers run {LACKED}"
    assert layer.endswith(f"{LACKED}, ampere: NVRTC is too old")


def test_the_status_does_not_wait_for_layers_that_are_gone_or_never_loaded(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM keeps the tower of a model that serves no images, without memory."""
    caplog.set_level(logging.INFO)
    status, kept, tower, thrown = ModelStatus(), _Layer(), torch.nn.Linear(2, 2, device="meta"), _Layer()
    for name, layer in (("a", kept), ("visual.a", tower), ("lm_head", thrown)):
        status.expect_layer(name, layer)
    del thrown, layer
    status.note_outcome("a", SPARSE, LOG)
    assert caplog.messages[0] == "slidesparse: 1 of 1 layers run sparse"


def test_a_start_up_that_leaves_all_eligible_layers_dense_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def settled(*outcomes: Outcome) -> list[str]:
        caplog.clear()
        status, layers = ModelStatus(), [_Layer() for _ in outcomes]
        for i, layer in enumerate(layers):
            status.expect_layer(str(i), layer)
        for i, outcome in enumerate(outcomes):
            status.note_outcome(str(i), outcome, LOG)
        return [record.message for record in caplog.records if record.levelno == logging.WARNING]

    left = Outcome(False, True, "6:8; not measured", eligible=True)
    (warning,) = settled(left, left, NO_PATTERN)
    assert "none of the 2 layers that could run sparse does (6:8; not measured)" in warning
    assert settled(left, Outcome(True, True, "6:8 by hopper", eligible=True)) == []
    assert settled(Outcome(False, True, "as the checkpoint says")) == []
