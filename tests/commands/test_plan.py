"""The plan of ``slidesparse prune``: made without a weight, and what it says is what the run writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from checkpoints import by_magnitude, contents, make_checkpoint, make_source, make_w8a8
from small_models import make

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.errors import CheckpointError
from slidesparse.offline import execute
from slidesparse.offline.calibrate.calibration import Calibration
from slidesparse.offline.plan import plan
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.offline.prune_options import PruneOptions


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", by_magnitude("6:8", "int8", layers={"re:.*down_proj": "dense"}, ignore=("re:.*o_proj",))),
        ("llama", by_magnitude("4:6", "bf16", lm_head=True)),
        ("mixtral", by_magnitude("6:8", "fp8")),
        ("gpt-oss", by_magnitude("6:8", "bf16", layers={"re:.*layers.0.*experts.down": "2:4"})),
        ("qwen3-vl-moe", by_magnitude("6:8", "int8")),
    ],
    ids=["int8", "bf16", "experts", "experts that share a tensor", "experts that are cut apart"],
)
def test_the_run_writes_what_the_plan_says(
    tmp_path: Path, name: str, options: PruneOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "llama":
        make_checkpoint(tmp_path / "m", shard_size="60KB")
    else:
        make(tmp_path / "m", ARCHITECTURES[name])
    checkpoint = Checkpoint(tmp_path / "m")
    with monkeypatch.context() as patch:
        for read in ("tensor", "part"):
            patch.setattr(Checkpoint, read, lambda *_: pytest.fail("a weight was read"))
        made = plan(checkpoint, options)
    done = prune_checkpoint(tmp_path / "m", tmp_path / "s", options)
    written = Checkpoint(tmp_path / "s")
    assert {shard: {**jobs}.keys() for shard, jobs in made.shards.items()} == {
        shard: tensors.keys() for shard, tensors in checkpoint.shards.items()
    }
    assert made.outputs == written.shards
    assert json.loads(json.dumps(made.config)) == written.config
    assert {name: str(pattern) for name, pattern in made.patterns.items()} == {**done.patterns, **done.experts}
    for shard, jobs in made.shards.items():
        for tensor, job in jobs.items():
            for output in job.outputs if job.layer is None else ():
                assert (shard, output) == (written.files[output], tensor)
                assert torch.equal(written.tensor(output), checkpoint.tensor(tensor))


def test_a_quantised_source_that_is_dense_stays_as_it_is(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    make_w8a8(tmp_path / "m", tmp_path / "q", "fp8")
    prune_checkpoint(tmp_path / "q", tmp_path / "s", by_magnitude("dense"))
    name = "model.safetensors"
    assert contents(tmp_path / "s")[name] == contents(tmp_path / "q")[name]


def test_a_killed_run_goes_on_where_its_text_lies_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the text becomes decides, not its name. The run was refused, as one with another --calibration."""
    source = make_source(tmp_path, "llama", torch.float32)
    options = PruneOptions("6:8", "int8", "wanda", Calibration(str(tmp_path / "text.txt"), 4, 16))
    elsewhere = replace(options, calibration=Calibration(str(tmp_path / "moved.txt"), 4, 16))
    (tmp_path / "moved.txt").write_text((tmp_path / "text.txt").read_text())
    prune_checkpoint(source, tmp_path / "whole", elsewhere)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(execute, "write_shard", killed)
        with pytest.raises(KeyboardInterrupt):
            prune_checkpoint(source, tmp_path / "s", options)
    layer = tmp_path / "s.partial/kept/model.layers.0.safetensors"
    before = layer.stat().st_mtime_ns
    (tmp_path / "text.txt").unlink()
    for other in (
        Calibration(str(tmp_path / "moved.txt"), 4, 16, seed=1),
        Calibration(str(tmp_path / "moved.txt"), 5, 16),
    ):
        with pytest.raises(CheckpointError, match=r"another run; got a difference in calibration"):
            prune_checkpoint(source, tmp_path / "s", replace(options, calibration=other))
    assert layer.stat().st_mtime_ns == before
    prune_checkpoint(source, tmp_path / "s", elsewhere)
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")
