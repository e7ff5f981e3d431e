"""What a user may say to the plugin, and what becomes of it: without vLLM."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slidesparse.errors import InputError
from slidesparse.integrations.vllm.model_state import ModelState
from slidesparse.integrations.vllm.options import Options


def test_options_are_read_strictly() -> None:
    assert Options.parse({}) == Options() == Options.parse(None)
    given = {"backend": "cusparselt", "fallback": "none", "fuse": False, "host_us": 50}
    assert Options.parse({"slidesparse": given}) == Options("cusparselt", "none", fuse=False, host_us=50.0)
    assert Options.parse({"slidesparse": {"host_us": 0}}).host_us == 0
    assert Options.parse({"slidesparse": {"tune": "off"}}) == Options(tune="off")
    assert Options.parse({"slidesparse": {"graphs": "vllm"}}) == Options(graphs="vllm")
    for wrong in (
        {"back": "auto"},
        {"backend": "fast"},
        {"backend": ["hopper"]},
        {"fallback": "sparse"},
        {"fuse": 1},
        {"tune": False},
        {"graphs": 1024},
        {"experts": True},
        ["auto"],
    ):
        with pytest.raises(InputError):
            Options.parse({"slidesparse": wrong})


def test_options_outside_of_their_key_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = vllm_config(tune="off")
    ModelState.create(config)
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]
    config.additional_config |= {"backend": "hopper", "another_plugins": 1}
    assert ModelState.create(config).options.backend == "auto"
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "backend is ignored outside of the key slidesparse" in line
    assert line.endswith("""write '{"slidesparse": {"backend": "hopper"}}'""")


@pytest.mark.parametrize("wrong", [-1, math.inf, math.nan, True, "75", None])
def test_the_hosts_time_is_a_number(wrong: object) -> None:
    with pytest.raises(InputError):
        Options.parse({"slidesparse": {"host_us": wrong}})


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


def test_a_model_that_is_cut_between_gpus_is_known_as_a_part() -> None:
    assert not ModelState.create(vllm_config()).status.part
    assert ModelState.create(vllm_config(gpus=2)).status.part


def test_layers_are_measured_unless_the_user_wants_none() -> None:
    tuner = ModelState.create(vllm_config()).tuner
    assert (tuner.sizes[-1], tuner.source) == (2048, torch.bfloat16)
    assert ModelState.create(vllm_config(tune="off")).tuner is None


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
