"""Perplexity by its definition, and ``slidesparse eval``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import add_tokenizer, by_magnitude, make_checkpoint, put_bos_first, write_text
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from slidesparse.cli import main
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.models import perplexity
from slidesparse.models.perplexity import measure_perplexity, windows
from slidesparse.offline.evaluate import Evaluation, evaluate
from slidesparse.offline.prune import prune_checkpoint

VOCABULARY = 11


def recalling(ids: torch.Tensor) -> torch.Tensor:
    """Logits that depend on all tokens before, so that a wrong context shows."""
    seen = torch.nn.functional.one_hot(ids, VOCABULARY).float().cumsum(1)
    return seen * torch.arange(1.0, VOCABULARY + 1)


@given(n=st.integers(2, 80), window=st.integers(2, 30), data=st.data())
def test_every_token_is_scored_once_with_enough_before_it(n: int, window: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, window - 1))
    scored = []
    for reading in windows(n, window, stride):
        assert reading.end - reading.start <= window
        here = range(reading.end - reading.scored, reading.end)
        scored += here
        for token in here:
            context = token - reading.start
            assert context >= (min(token, window - stride) if reading.start else token)
    assert scored == list(range(1, n))


@pytest.mark.parametrize(("window", "stride", "batch"), [(64, 1, 1), (16, 8, 3), (2, 1, 2)])
def test_by_definition(window: int, stride: int, batch: int) -> None:
    tokens = torch.randint(0, VOCABULARY, (53,))
    expected = 0.0
    for token in range(1, len(tokens)):
        # the first window that reaches the token
        start = next(w.start for w in windows(len(tokens), window, stride) if w.end > token)
        probabilities = recalling(tokens[None, start:token])[0, -1].double().softmax(-1)
        expected -= math.log(float(probabilities[tokens[token]]))
    measured = measure_perplexity(recalling, tokens, window, stride, n_bytes=100, batch=batch)
    assert measured.tokens == 52
    assert measured.nats == pytest.approx(expected, rel=1e-5)  # float32 logits
    assert measured.perplexity == pytest.approx(math.exp(expected / 52), rel=1e-5)
    assert measured.bits_per_byte == pytest.approx(expected / math.log(2) / 100, rel=1e-5)


class _Float32(TorchDispatchMode):
    """The most elements of a float32 tensor that was made."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float32:
            self.most = max(self.most, made.numel())
        return made


@pytest.mark.parametrize("batch", [1, 2])
def test_few_tokens_have_float32_logits_at_a_time(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """Those of a window can take more memory than the model, whose own logits are half as large."""
    tokens, table = torch.randint(VOCABULARY, (50,)), torch.randn(VOCABULARY, VOCABULARY).bfloat16()
    measure = partial(measure_perplexity, table.__getitem__, tokens, 20, 10, batch=batch)
    whole = measure()
    monkeypatch.setattr(perplexity, "CHUNK", 3 * VOCABULARY)
    with _Float32() as made:
        assert measure() == whole
    assert made.most == 3 * VOCABULARY


@pytest.mark.parametrize(
    ("tokens", "window", "stride", "how"),
    [
        (10, 4, 0, {}),
        (10, 4, 4, {}),
        (1, 1, 1, {}),
        (10, 1, 1, {}),
        (10, 4, 2, {"batch": 0}),
        (10, 4, 2, {"batch": -1}),
    ],
)
def test_unusable_numbers(tokens: int, window: int, stride: int, how: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"window|too short"):
        measure_perplexity(recalling, torch.arange(tokens), window, stride, **how)


def test_activations_that_break_are_named() -> None:
    with pytest.raises(InputError, match="NaN or Inf at tokens 0 to 4"):
        measure_perplexity(lambda ids: recalling(ids) * math.nan, torch.arange(10), 4, 2)


def test_a_ruined_model_has_a_perplexity_too() -> None:
    """Sure of the wrong token by more nats than the largest float has."""
    measured = measure_perplexity(lambda ids: 2000.0 * torch.eye(VOCABULARY)[ids], torch.arange(10), 4, 2)
    assert measured.loss == 2000
    assert measured.perplexity == math.inf
    told = json.dumps(Evaluation("m", "t", measured, {}).to_json(), allow_nan=False)
    assert json.loads(told)["perplexity"]["perplexity"] is None


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "m", "llama", torch.float32)
    add_tokenizer(tmp_path / "m")
    write_text(tmp_path / "text.txt", words=60)
    return tmp_path / "m"


def test_dense_and_pruned_checkpoints(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = source.parent / "text.txt"
    prune_checkpoint(source, source.parent / "s", by_magnitude("6:8", "int8"))
    found = {}
    for name in ("m", "s"):
        words = ["--text", str(text), "--window", "32", "--device", "cpu", "--json"]
        capsys.readouterr()
        assert main(["eval", str(source.parent / name), *words]) == 0
        told = capsys.readouterr()
        found[name] = json.loads(told.out)["perplexity"]
        count = len([*windows(found[name]["tokens"] + 1, 32, 16)])
        assert f"eval: {count} windows of 32 tokens on the CPU, {found[name]['tokens'] + 1} tokens to score" in told.err
        assert ("slower than dense there, as expected" in told.err) == (name == "s")
    assert found["m"]["tokens"] == found["s"]["tokens"] == len(text.read_text()) - 1  # one token a letter
    assert found["m"]["perplexity"] != found["s"]["perplexity"]
    assert (found["m"]["window"], found["m"]["stride"]) == (32, 16)
    said = evaluate(source, text=text, device="cpu").describe()
    assert f"{found['m']['tokens']} tokens of {text}, one window of {found['m']['tokens'] + 1} tokens)" in said
    # The same by hand, on the model that transformers loads.
    from transformers import AutoModelForCausalLM

    from slidesparse.models.perplexity import logits_of
    from slidesparse.offline.calibrate.calibration import encode, load_tokenizer

    model = AutoModelForCausalLM.from_pretrained(source)
    tokens = encode(load_tokenizer(source), text.read_text())
    measured = measure_perplexity(logits_of(model), tokens, 32, 16)
    assert measured.perplexity == pytest.approx(found["m"]["perplexity"], rel=1e-6)


def test_a_short_text_is_one_window_with_what_the_tokenizer_puts_before_it(source: Path) -> None:
    put_bos_first(source)
    (source.parent / "short.txt").write_text("slide over windows of four.")
    found, bare = (evaluate(source, text=source.parent / "short.txt", bos=bos).perplexity for bos in (True, False))
    assert found is not None
    assert bare is not None
    assert (found.window, found.tokens) == (28, 27)
    assert (bare.window, bare.tokens) == (27, 26)


@pytest.mark.parametrize(
    "wrong", [{}, *({"text": "text.txt", name: 0} for name in ("batch", "limit")), {"window": 999_999}]
)
def test_bad_requests(source: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]) -> None:
    monkeypatch.chdir(source.parent)
    with pytest.raises(InputError):
        evaluate(source, **({"text": "text.txt"} | wrong if "window" in wrong else wrong))


@pytest.mark.parametrize("harness", [None, "import transformers\ntransformers.AutoModelForNothing\n"])
def test_no_harness_that_can_be_used(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harness: str | None
) -> None:
    """None at all, and one that is too old for this transformers: 0.4.9 names a class that is gone."""
    if harness is None:
        monkeypatch.setitem(sys.modules, "lm_eval", None)
    else:
        (tmp_path / "lm_eval").mkdir()
        (tmp_path / "lm_eval/__init__.py").write_text(harness)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "lm_eval", raising=False)
    with pytest.raises(UnsupportedError, match="harness cannot be imported"):
        evaluate(source, tasks=["counting"])


def stand_in(monkeypatch: pytest.MonkeyPatch, simple_evaluate: Callable[..., dict[str, Any]]) -> None:
    """Put the two entry points of lm-eval 0.4 that are used in its place; tests/evaluation_harness has the real one."""
    package, models, huggingface = (ModuleType(f"lm_eval{rest}") for rest in ("", ".models", ".models.huggingface"))
    huggingface.HFLM = lambda **arguments: SimpleNamespace(**arguments)  # type: ignore[attr-defined]
    package.simple_evaluate, package.models = simple_evaluate, models  # type: ignore[attr-defined]
    models.huggingface = huggingface  # type: ignore[attr-defined]
    for module in (package, models, huggingface):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_tasks_go_to_the_harness(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def simple_evaluate(**arguments: Any) -> dict[str, Any]:
        asked.update(arguments)
        counting = {"alias": "counting", "sample_len": 3, "acc,none": 0.25, "acc_stderr,none": "N/A"}
        return {"results": {"counting": counting}}

    stand_in(monkeypatch, simple_evaluate)
    found = evaluate(source, tasks=["counting"], limit=3, batch=2)
    assert found.tasks == {"counting": {"acc,none": 0.25}}
    assert found.describe() == "counting: acc,none 0.2500"
    assert (asked["tasks"], asked["limit"], asked["model"].batch_size) == (["counting"], 3, 2)
    assert asked["model"].trust_remote_code is False
