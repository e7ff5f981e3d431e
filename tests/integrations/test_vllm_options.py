"""What a user may say to the plugin, and what becomes of it: without vLLM."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slidesparse.errors import InputError
from slidesparse.integrations.vllm import model_state
from slidesparse.integrations.vllm.model_state import ModelState
from slidesparse.integrations.vllm.options import Options


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"back": "auto"},
            {"backend": "fast"},
            {"backend": ["hopper"]},
            {"fallback": "sparse"},
            {"fuse": 1},
            ["auto"],
        ),
        *({"tune": False}, {"graphs": 1024}, {"experts": True}),
    ],
    ids=repr,
)
def test_wrong_options_are_refused(wrong: object) -> None:
    with pytest.raises(InputError):
        Options.parse({"slidesparse": wrong})


def vllm_config(eager: bool = False, mode: int = 3, gpus: int = 1, **options: Any) -> Any:
    """What is read of vLLM's."""
    return SimpleNamespace(
        additional_config={"slidesparse": options},
        model_config=SimpleNamespace(enforce_eager=eager, dtype=torch.bfloat16),
        compilation_config=SimpleNamespace(mode=mode, backend="inductor"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        parallel_config=SimpleNamespace(pipeline_parallel_size=gpus),
        lora_config=None,
        speculative_config=None,
    )


@pytest.mark.parametrize(("value", "asked"), [(None, False), ("0", False), ("1", True)])
def test_a_model_that_must_not_depend_on_the_batch_keeps_to_exact_products(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str | None, asked: bool
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    model = ModelState.create(vllm_config())
    assert model.options.fuse != asked
    assert ("VLLM_BATCH_INVARIANT is set, and a fused norm" in caplog.text) == asked
    assert model.why_left(torch.int8) is None
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        assert ("only INT8 products" in str(model.why_left(dtype))) == asked


def test_options_are_read_from_their_key(caplog: pytest.LogCaptureFixture) -> None:
    assert Options.parse({}) == Options() == Options.parse(None)
    given = {"backend": "cusparselt", "fallback": "none", "fuse": False, "tune": "off", "graphs": "vllm"}
    assert Options.parse({"slidesparse": given}) == Options(**given)  # type: ignore[arg-type]
    config = vllm_config(tune="off")
    made = ModelState.create(config)
    assert made.tuner is None
    assert not made.status.part
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]
    config = vllm_config(gpus=2)
    config.additional_config |= {"backend": "hopper", "another_plugins": 1}
    made = ModelState.create(config)
    assert made.options.backend == "auto"
    assert made.status.part
    assert (made.tuner.sizes[-1], made.tuner.source) == (2048, torch.bfloat16)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "backend is ignored outside of the key slidesparse" in line
    assert line.endswith("""write '{"slidesparse": {"backend": "hopper"}}'""")


def test_without_torchs_matcher_nothing_is_joined_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert ModelState.create(vllm_config()).options.fuse
    monkeypatch.setattr(model_state, "can_match_graphs", lambda: False)
    assert not ModelState.create(vllm_config()).options.fuse
    assert "no norm or activation is fused with a linear: this torch has another interface" in caplog.messages[-1]
