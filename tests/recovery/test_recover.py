"""``slidesparse recover`` on small models: what stays, what is learned, what goes on after a kill, what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from architectures import ARCHITECTURES
from checkpoints import (
    SMALL,
    add_tokenizer,
    by_magnitude,
    make_checkpoint,
    make_w8a8,
    prune_words,
    reverse_letters,
    tensors,
    write_text,
)
from rank_processes import run_ranks
from small_models import build, make

import slidesparse
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.marker import Marker
from slidesparse.cli import main
from slidesparse.errors import CheckpointError, InputError, SlideSparseError, SlideSparseWarning, UnsupportedError
from slidesparse.files.tensor_writer import write_tensors
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.recovery import state
from slidesparse.recovery.networks import DenseNetwork, StudentNetwork
from slidesparse.recovery.options import RecoverOptions
from slidesparse.recovery.run import recover
from slidesparse.recovery.state import State
from slidesparse.recovery.training import Training
from slidesparse.recovery.windows import read_windows
from slidesparse.weights.support import check_pattern

WINDOW, WINDOWS = 32, 8


def options(folder: Path, steps: int = 6, **changes: Any) -> RecoverOptions:
    texts = (str(folder / "text.txt"),)
    batch = WINDOW * WINDOWS
    usual = {"texts": texts, "tokens": steps * batch, "batch": batch, "window": WINDOW, "eval_windows": 8, "lr": 3e-3}
    return RecoverOptions(**{**usual, **changes})


def make_pair(
    folder: Path, name: str = "llama", pattern: str = "2:4", layers: dict[str, str] | None = None, **changes: Any
) -> None:
    """A dense checkpoint, a pruned one and a text."""
    make_checkpoint(folder / "base", name, **changes)
    add_tokenizer(folder / "base")
    write_text(folder / "text.txt", 900)
    prune_checkpoint(folder / "base", folder / "pruned", by_magnitude(pattern, "bf16", layers=layers or {}))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    make_pair(folder)
    return folder


def same_bytes(one: Path, other: Path) -> bool:
    return (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("name", "train"), [("llama", "body"), ("qwen2", "all"), ("qwen3", "linears")])
def test_it_learns_and_the_zeros_stay(name: str, train: Any, tmp_path: Path) -> None:
    make_pair(tmp_path, name)
    found = recover(tmp_path / "pruned", tmp_path / "base", tmp_path / "out", options(tmp_path, steps=25, train=train))
    assert found.kept == "after"
    assert found.after["kl"] < 0.7 * found.before["kl"]
    before, after = tensors(tmp_path / "pruned"), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    linears = {one for one in before if "_proj.weight" in one}
    for one in linears:
        assert torch.equal(after[one] == 0, before[one] == 0)
        check_pattern(after[one], "2:4")
    changed = {one for one in before if not torch.equal(before[one], after[one])}
    embeddings = {one for one in before if "embed" in one or "head" in one}
    assert changed >= linears
    assert bool(changed & embeddings) == (train == "all")
    assert bool({one for one in changed if "norm" in one}) == (train != "linears")
    # It is a source for prune again, which keeps the zeros and quantises.
    assert main(prune_words(tmp_path / "out", tmp_path / "served", "--dtype", "int8", pattern="2:4")) == 0
    int8 = tensors(tmp_path / "served")
    assert all(not bool(int8[one][before[one] == 0].any()) for one in linears)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr() or name != "qwen2"
    record = json.loads((tmp_path / "out/recover.json").read_text())
    assert record["after"] == found.after
    assert record["options"]["texts"] == ["text.txt"]
    assert not [path for path in (tmp_path / "out").iterdir() if str(tmp_path).encode() in path.read_bytes()]
    assert len(record["losses"]) == found.steps
    assert record["losses"][-1] < record["losses"][0]
    assert not (tmp_path / "out.partial").exists()


def test_what_prune_said_of_it_stays(tmp_path: Path) -> None:
    """So that it loads, and is rounded under its own patterns alone, those of single layers among them."""
    make_pair(tmp_path, pattern="6:8", layers={"re:.*o_proj": "8:10"})
    recover(tmp_path / "pruned", tmp_path / "base", tmp_path / "out", options(tmp_path, steps=4))
    marker = Marker.require(Checkpoint(tmp_path / "out").config, tmp_path)
    assert (str(marker.pattern), set(map(str, marker.layers.values()))) == ("6:8", {"8:10"})
    assert slidesparse.load(tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert -1 < card.find("`slidesparse recover` trained it on 1024 tokens") < card.find("## Serve and load")
    with pytest.raises(InputError, match=r"as .*out is pruned"):
        prune_checkpoint(tmp_path / "out", tmp_path / "other", by_magnitude("4:6", "int8"))
    prune_checkpoint(tmp_path / "out", tmp_path / "served", by_magnitude("6:8", "int8"))
    assert Marker.require(Checkpoint(tmp_path / "served").config, tmp_path) == marker


def test_code_is_not_copied_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_pair(tmp_path)
    (tmp_path / "pruned/modeling_x.py").write_text("raise SystemExit")
    recover(tmp_path / "pruned", tmp_path / "base", tmp_path / "out", options(tmp_path, steps=1))
    assert not (tmp_path / "out/modeling_x.py").exists()
    assert "not copied, other weights or code: modeling_x.py" in capsys.readouterr().err


def test_advice_is_this_commands(tmp_path: Path) -> None:
    make_pair(tmp_path)
    (tmp_path / "pruned/link").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match=r"link out of the source; got .*; put a copy in its place") as caught:
        recover(tmp_path / "pruned", tmp_path / "base", tmp_path / "out", options(tmp_path))
    assert "--links" not in str(caught.value)


def test_the_first_line_says_what_is_trained_on(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A budget that is no whole number of steps is rounded, and not in silence."""
    recover(pair / "pruned", pair / "base", tmp_path / "out", options(pair, tokens=300))
    assert re.search(r"; 1 step of 8 windows, 256 tokens, [0-9.]+ % of the text\n", capsys.readouterr().err)


class Killed(BaseException):
    """Ends a run as a kill does: nothing is cleared up that a kill would leave."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_killed_run_goes_on_and_has_the_same_bytes(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    wanted = options(pair, save_minutes=1e-9)
    recover(pair / "pruned", pair / "base", tmp_path / "whole", wanted, device=device)
    save = State.save

    def killed(kept: State, progress: Any, ranks: Any) -> None:
        save(kept, progress, ranks)
        if progress.step == 3:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(State, "save", killed)
        with pytest.raises(Killed):
            recover(pair / "pruned", pair / "base", tmp_path / "out", wanted, device=device)
    assert not (tmp_path / "out").exists()
    # A shorter run has other rates, and may not take its place.
    with pytest.raises(CheckpointError, match=r"unfinished output of another run; got a difference in tokens"):
        recover(pair / "pruned", pair / "base", tmp_path / "out", options(pair, steps=5), device=device)
    steps = []
    step = Training._step
    monkeypatch.setattr(Training, "_step", lambda self, number, lr: steps.append(number) or step(self, number, lr))
    recover(pair / "pruned", pair / "base", tmp_path / "out", wanted, device=device)
    assert steps == [3, 4, 5]
    assert same_bytes(tmp_path / "whole", tmp_path / "out")


def interrupted(pair: Path, out: Path, wanted: RecoverOptions) -> str:
    """Interrupt a run in its fourth step, and return what is said."""
    step = Training._step

    def ends(self: Training, number: int, lr: float) -> Any:
        if number == 3:
            raise KeyboardInterrupt
        return step(self, number, lr)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "_step", ends)
        with pytest.raises(KeyboardInterrupt) as ended:
            recover(pair / "pruned", pair / "base", out, wanted)
    return str(ended.value)


def test_an_interrupted_run_loses_no_step(pair: Path, tmp_path: Path) -> None:
    recover(pair / "pruned", pair / "base", tmp_path / "whole", options(pair))
    said = interrupted(pair, tmp_path / "out", options(pair))
    assert re.search(r"keeps the state after step 3 of 6, and .* goes on from there", said)
    recover(pair / "pruned", pair / "base", tmp_path / "out", options(pair))
    assert same_bytes(tmp_path / "whole", tmp_path / "out")


def test_a_text_is_known_by_what_is_in_it(pair: Path, tmp_path: Path) -> None:
    text = shutil.copy(pair / "text.txt", tmp_path / "a.txt")
    interrupted(pair, tmp_path / "out", options(pair, texts=(str(text),)))
    assert not [one for one in (tmp_path / "out.partial").rglob("*") if one.is_file() and b"PROTO" in one.read_bytes()]
    write_text(text, 901)
    with pytest.raises(CheckpointError, match="a difference in texts"):
        recover(pair / "pruned", pair / "base", tmp_path / "out", options(pair, texts=(str(text),)))
    moved = options(pair, texts=(str(shutil.copy(pair / "text.txt", tmp_path / "b.txt")),))
    recover(pair / "pruned", pair / "base", tmp_path / "out", moved)
    assert json.loads((tmp_path / "out/recover.json").read_text())["options"]["texts"] == ["b.txt"]


def test_a_damaged_state_is_found(pair: Path, tmp_path: Path) -> None:
    """One flipped bit of a tensor or of the progress, and no file at all."""
    interrupted(pair, tmp_path / "out", options(pair))
    path = tmp_path / "out.partial/kept/step-00000003/rank-0.safetensors"
    whole = path.read_bytes()
    for place in (0.5, 0.9999):
        content = bytearray(whole)
        content[int(place * len(content))] ^= 1
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"damaged; got other .*; remove .*out.partial and run again"):
            recover(pair / "pruned", pair / "base", tmp_path / "out", options(pair))
    path.unlink()
    with pytest.raises(CheckpointError, match=r"rank-0.safetensors is missing; remove .*out.partial and run again"):
        recover(pair / "pruned", pair / "base", tmp_path / "out", options(pair))


def test_a_state_of_several_processes_is_taken_over_by_one(pair: Path, tmp_path: Path) -> None:
    """Each of them writes its rows, the last one perhaps fewer."""
    recover(pair / "pruned", pair / "base", tmp_path / "whole", options(pair))
    interrupted(pair, tmp_path / "out", options(pair))
    kept = tmp_path / "out.partial/kept/step-00000003"
    values = safetensors.torch.load_file(kept / "rank-0.safetensors")
    progress = {state.PROGRESS: values.pop(state.PROGRESS)}
    for rank in range(3):
        parts = {name: (one.tensor_split([30, 60])[rank] if one.dim() else one) for name, one in values.items()}
        write_tensors(kept / f"rank-{rank}.safetensors", parts if rank else parts | progress)
    recover(pair / "pruned", pair / "base", tmp_path / "out", options(pair))
    assert same_bytes(tmp_path / "whole", tmp_path / "out")


def test_a_state_of_one_process_is_taken_over_by_two(pair: Path, tmp_path: Path, monkeypatch: Any) -> None:
    words = ["recover", pair / "pruned", "--dense", pair / "base", "--text", pair / "text.txt", "--tokens", "1536"]
    words += ["--batch", "256", "--window", "32", "--eval-windows", "7", "--lr", "3e-3", "--device", "cpu", "--json"]
    words = [*map(str, words), "--save-minutes", "1e-9"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    save = State.save

    def killed(kept: State, progress: Any, ranks: Any) -> None:
        save(kept, progress, ranks)
        if progress.step == 3:
            os.kill(os.getpid(), 15)

    with monkeypatch.context() as patch:
        patch.setattr(State, "save", killed)
        assert main([*words, str(tmp_path / "out")]) == 143
    assert (tmp_path / "out.partial/kept/step-00000003").exists()
    ended = run_ranks(tmp_path, 2, [*words, tmp_path / "out"])
    assert [one.status for one in ended] == [0, 0], ended
    first, second = (json.loads((tmp_path / name / "recover.json").read_text()) for name in ("whole", "out"))
    assert second["steps"] == 6
    assert second["after"]["kl"] == pytest.approx(first["after"]["kl"], rel=1e-3)
    one, two, pruned = (tensors(path) for path in (tmp_path / "whole", tmp_path / "out", pair / "pruned"))
    for name, value in one.items():
        assert torch.equal(two[name] == 0, value == 0)
        moved = (value.float() - pruned[name].float()).norm()
        assert float((two[name].float() - value.float()).norm()) <= 0.02 * float(moved)


def test_activations_that_are_computed_again_change_nothing(pair: Path, tmp_path: Path) -> None:
    for name in ("on", "off"):
        recover(pair / "pruned", pair / "base", tmp_path / name, options(pair, steps=2, gradient_checkpointing=name))
    assert same_bytes(tmp_path / "on", tmp_path / "off")


@pytest.fixture
def compiled_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Lets networks be compiled here, too, by a backend, and fails where a form is left out; gives dynamo's counts."""
    compile_, counters = torch.compile, torch._dynamo.utils.counters

    def by(backend: Any) -> Any:
        monkeypatch.setattr(torch, "compile", lambda function, **how: compile_(function, backend=backend, **how))
        monkeypatch.setattr("slidesparse.recovery.run.compiles", lambda _: True)
        torch._dynamo.reset()
        counters.clear()
        return counters

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield by


def test_compiled_layers_and_loss_train_alike(pair: Path, tmp_path: Path, compiled_by: Any) -> None:
    off = recover(pair / "pruned", pair / "base", tmp_path / "off", options(pair, steps=3))
    graphs = compiled_by("eager")  # the graphs alone: code of their own would need a compiler
    on = recover(pair / "pruned", pair / "base", tmp_path / "on", options(pair, steps=3))
    assert on.before["kl"] == pytest.approx(off.before["kl"], rel=1e-5)
    assert on.losses == pytest.approx(off.losses, rel=1e-4)
    assert graphs["stats"]["unique_graphs"] >= 4  # dense, judged, trained, and the loss
    assert not graphs["graph_break"]
    assert [json.loads((tmp_path / name / "recover.json").read_text())["compiled"] for name in ("off", "on")] == [
        False,
        True,
    ]


def test_layers_of_several_kinds_compile_whole(tmp_path: Path, compiled_by: Any) -> None:
    make_pair(tmp_path, "smollm3", num_hidden_layers=6)  # of which some rotate positions: past dynamo's usual limit
    compiled_by("eager")
    found = recover(tmp_path / "pruned", tmp_path / "base", tmp_path / "out", options(tmp_path, steps=3, micro_batch=3))
    assert found.after["kl"] < found.before["kl"]


def test_what_cannot_be_compiled_is_told_in_one_line(pair: Path, tmp_path: Path, compiled_by: Any) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("Failed to find C compiler")

    compiled_by(broken)
    with pytest.raises(
        UnsupportedError, match=r"got RuntimeError: Failed to find C compiler; set TORCH_COMPILE_DISABLE=1"
    ):
        recover(pair / "pruned", pair / "base", tmp_path / "out", options(pair, steps=1))


@pytest.mark.parametrize(("dtype", "rounding"), [("int8", "absmax"), ("int8", "6bit"), ("fp8", "absmax")])
def test_it_trains_what_is_served(dtype: Any, rounding: Any, tmp_path: Path) -> None:
    """The evaluation loss with rounding in the loop is that of the checkpoint that prune makes of the result."""
    make_pair(tmp_path)
    wanted = options(tmp_path, steps=8, dtype=dtype, rounding=rounding)
    found = recover(tmp_path / "pruned", tmp_path / "base", tmp_path / "out", wanted)
    assert found.after["kl"] < found.before["kl"]
    rounded = "--dtype", dtype, "--rounding", rounding
    assert main(prune_words(tmp_path / "out", tmp_path / "served", *rounded, pattern="2:4")) == 0
    ids = read_windows(tmp_path / "base", transformers.LlamaConfig(**SMALL), wanted).evaluation.long()
    logits = slidesparse.load(tmp_path / "served")(ids).logits[:, :-1].float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    # Activations are BF16 where it is served, and float32 in the loop.
    assert float(loss) == pytest.approx(found.after["loss"], rel=5e-3)


def test_the_weights_that_are_written_are_evaluated(pair: Path, tmp_path: Path) -> None:
    """In BF16, not in the float32 of training."""
    found = recover(pair / "pruned", pair / "base", tmp_path / "out", wanted := options(pair, steps=8))
    ids = read_windows(pair / "base", transformers.LlamaConfig(**SMALL), wanted).evaluation.long()
    written: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        logits = written(ids).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert found.kept == "after"
    assert found.after["loss"] == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_experts_learn_and_routers_are_held(family: str, tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **sizes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.15)
    model.save_pretrained(tmp_path / "base")
    add_tokenizer(tmp_path / "base")
    write_text(tmp_path / "text.txt", 900)
    assert main(prune_words(tmp_path / "base", tmp_path / "pruned", "--dtype", "bf16", pattern="2:4")) == 0
    found = recover(tmp_path / "pruned", tmp_path / "base", tmp_path / "out", options(tmp_path, steps=10, train="all"))
    assert found.after["kl"] < found.before["kl"]
    before, after = tensors(tmp_path / "pruned"), tensors(tmp_path / "out")
    routers = {name for name in before if re.search(r"(mlp|block_sparse_moe)\.gate\.", name)}
    experts = {name for name in before if "experts" in name}
    assert routers
    assert experts
    assert all(torch.equal(before[name], after[name]) for name in routers)
    for name in experts:
        assert torch.equal(after[name] == 0, before[name] == 0)
        assert not torch.equal(after[name], before[name])
    before[sorted(experts)[0]][..., 1, :] = 1
    safetensors.torch.save_file(before, tmp_path / "pruned/model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"experts.* violates 2:4 at row 1, group 0"):
        recover(tmp_path / "pruned", tmp_path / "base", tmp_path / "refused", options(tmp_path))


def test_the_weights_of_before_are_kept_where_training_made_them_worse(pair: Path, tmp_path: Path) -> None:
    found = recover(pair / "pruned", pair / "base", tmp_path / "out", options(pair, lr=30.0))
    assert found.kept == "before"
    assert f"Training did not help; {tmp_path / 'out'} holds the untrained weights" in found.describe()
    few = "only 256 tokens: another text may give quite other figures; use more text, or a larger --eval-windows"
    assert few in found.describe().splitlines()
    assert few not in replace(found, eval_tokens=1000).describe()
    before, after = tensors(pair / "pruned"), tensors(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("steps", "broken", "found"), [(6, {2}, (6, 1, "after", False)), (60, range(16, 99), (25, 10, "after", True))]
)
def test_steps_without_a_finite_loss(
    pair: Path, tmp_path: Path, monkeypatch: Any, steps: int, broken: Collection[int], found: tuple[Any, ...]
) -> None:
    """One is left out; ten end the run with the last good weights."""
    forward, calls = StudentNetwork.forward, []

    def failing(self: StudentNetwork, ids: Any, dense: Any, counted: int | None = None) -> torch.Tensor:
        loss = forward(self, ids, dense, counted)
        if counted is None:
            calls.append(None)
            loss = loss * torch.nan if len(calls) in broken else loss
        return loss

    monkeypatch.setattr(StudentNetwork, "forward", failing)
    done = recover(pair / "pruned", pair / "base", tmp_path / "out", options(pair, steps=steps))
    assert (done.steps, done.left_out, done.kept, done.ended_early) == found
    assert done.after["kl"] < done.before["kl"]
    assert ("ended early" in done.describe()) == done.ended_early
    assert all(bool(value.isfinite().all()) for value in tensors(tmp_path / "out").values())


def test_of_two_budgets_the_first_that_is_spent_ends_a_run(pair: Path, tmp_path: Path) -> None:
    both = options(pair, tokens=100 * 256, minutes=1.0)
    assert both.steps == 100
    assert [both.spent(step, seconds) for step, seconds in ((25, 6.0), (25, 30.0), (100, 6.0))] == [0.25, 0.5, 1.0]
    found = recover(pair / "pruned", pair / "base", tmp_path / "out", options(pair, tokens=10**9, minutes=0.02))
    assert 1 <= found.steps < both.steps * 1000


def test_no_budget_is_told_before_a_model_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recover", "no/model", "out", "--dense", "no/dense", "--text", "no.txt"]) == 1
    assert "the budget; needed tokens or minutes" in capsys.readouterr().err


def test_minutes_are_a_budget_too(pair: Path, tmp_path: Path) -> None:
    found = recover(pair / "pruned", pair / "base", tmp_path / "out", options(pair, tokens=None, minutes=0.02))
    assert found.steps >= 1
    assert found.seconds >= 1.2


@pytest.mark.parametrize("train", ["body", "all"])
def test_a_bias_of_the_output_embedding_counts(tmp_path: Path, train: Any) -> None:
    """However small it is."""
    make(tmp_path / "base", ARCHITECTURES["phi"], max_position_embeddings=256)
    values = tensors(tmp_path / "base")
    (head,) = (name for name in values if name.endswith("lm_head.bias"))
    values[head] = torch.linspace(0, 0.1, 96).bfloat16()
    safetensors.torch.save_file(values, tmp_path / "base/model.safetensors", {"format": "pt"})
    add_tokenizer(tmp_path / "base")
    write_text(tmp_path / "text.txt", 900)
    prune_checkpoint(tmp_path / "base", tmp_path / "pruned", by_magnitude("2:4", "bf16"))
    wanted = options(tmp_path, steps=3, train=train)
    found = recover(tmp_path / "pruned", tmp_path / "base", tmp_path / "out", wanted)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    ids = read_windows(tmp_path / "base", model.config, wanted).evaluation.long()
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert float(loss) == pytest.approx(found.before["dense_loss"], rel=1e-5)
    assert found.after["kl"] < found.before["kl"]
    assert torch.equal(tensors(tmp_path / "out")[head], values[head]) == (train == "body")


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(folder: Path, said: str, kind: type[SlideSparseError] = InputError, **changes: Any) -> None:
    """One line, and nothing is left behind."""
    paths = {"pruned": folder / "pruned", "dense": folder / "base"}
    paths |= {name: changes.pop(name) for name in list(paths) if name in changes}
    with pytest.raises(kind, match=said) as caught:
        recover(paths["pruned"], paths["dense"], folder / "refused", options(folder, **changes))
    assert "\n" not in str(caught.value)
    assert not (folder / "refused").exists()
    assert not (folder / "refused.partial").exists()


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"intermediate_size": 160}, "got .*160.*; let --dense name"),
        ({"vocab_size": 128}, "got vocabularies of 96 and 128"),
        ({"num_hidden_layers": 3}, "got model.layers.2"),
    ],
)
def test_what_does_not_belong_together(pair: Path, tmp_path: Path, changes: dict[str, int], got: str) -> None:
    make_checkpoint(tmp_path / "other", **changes)
    add_tokenizer(tmp_path / "other")
    refused(pair, f"do not belong together; {got}", CheckpointError, dense=tmp_path / "other")


def test_a_teacher_of_other_weights_is_warned_of(pair: Path, tmp_path: Path) -> None:
    shutil.copytree(pair / "base", tmp_path / "other")
    other = tensors(tmp_path / "other")
    other["model.embed_tokens.weight"][40, 0] += 1
    safetensors.torch.save_file(other, tmp_path / "other/model.safetensors", {"format": "pt"})
    with pytest.warns(SlideSparseWarning, match=r"come from --dense .*other: its input embeddings differ"):
        recover(pair / "pruned", tmp_path / "other", tmp_path / "out", options(pair, steps=1, train="all"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlideSparseWarning)
        recover(pair / "pruned", pair / "base", tmp_path / "same", options(pair, steps=1))
        recover(tmp_path / "out", pair / "base", tmp_path / "trained", options(pair, steps=1))


def test_tokenizers_that_differ(pair: Path, tmp_path: Path) -> None:
    shutil.copytree(pair / "base", tmp_path / "base")
    reverse_letters(tmp_path / "base")
    refused(
        pair, "have tokenizers of other .*; got .* with 75 and 4; let --dense", CheckpointError, dense=tmp_path / "base"
    )
    shutil.copytree(pair / "pruned", tmp_path / "pruned")
    for name in ("base", "pruned"):
        add_tokenizer(tmp_path / name, "".join(chr(200 + i) for i in range(90)) + "abcdefghijklmnopqrstuvwxyz .")
    said = r"tokenizer of .* does not fit its model; got token 1\d\d; needed less than 96"
    refused(pair, said, CheckpointError, dense=tmp_path / "base", pruned=tmp_path / "pruned")


def test_a_model_that_is_not_pruned(pair: Path, tmp_path: Path) -> None:
    refused(pair, "is not pruned; got no zeros in its linears", pruned=pair / "base")
    model = transformers.LlamaForCausalLM.from_pretrained(pair / "base", dtype=torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data[0] = 0
        layer.mlp.up_proj.weight.data[1, :7] = 0
    model.save_pretrained(tmp_path / "holes")
    add_tokenizer(tmp_path / "holes")
    refused(pair, "is not pruned; got zeros that follow no pattern", pruned=tmp_path / "holes")


@pytest.mark.parametrize("scale", [1.001, 4.0])
def test_models_that_scale_their_logits(tmp_path: Path, scale: float) -> None:
    make(tmp_path / "base", ARCHITECTURES["granite"], logits_scaling=scale)
    add_tokenizer(tmp_path / "base")
    write_text(tmp_path / "text.txt", 900)
    prune_checkpoint(tmp_path / "base", tmp_path / "pruned", by_magnitude("2:4", "bf16"))
    refused(tmp_path, "Granite.* cannot be trained here; got logits that are not the product")


@pytest.mark.parametrize(
    ("name", "is_plain"),
    [("llama4-text", False), ("blip2", False), ("gemma2", True), ("recurrentgemma", False), ("cohere", False)],
)
def test_logits_of_other_forms(name: str, is_plain: bool) -> None:
    """Recurrent Gemma caps them under another name, and small ones hardly change by it."""
    network = DenseNetwork(build(ARCHITECTURES[name]).float().eval())
    with nullcontext() if is_plain else pytest.raises(InputError, match="cannot be trained here"):
        network.require_plain_head(torch.arange(16)[None])


def test_a_model_with_an_encoder_is_refused(pair: Path, tmp_path: Path) -> None:
    make(tmp_path / "base", ARCHITECTURES["bart"])
    prune_checkpoint(tmp_path / "base", tmp_path / "pruned", by_magnitude("2:4", "bf16"))
    with pytest.raises(InputError, match="BartForConditionalGeneration has no causal loss"):
        recover(tmp_path / "pruned", tmp_path / "base", tmp_path / "out", options(pair))


@pytest.mark.parametrize("name", ["base", "pruned"])
def test_predictions_that_are_no_numbers(pair: Path, tmp_path: Path, name: str) -> None:
    """Weights of finite size that overflow, and ones that are NaN; before the text is read."""
    for one in ("base", "pruned", "text.txt"):
        (shutil.copytree if one != "text.txt" else shutil.copy)(pair / one, tmp_path / one)
    values = tensors(tmp_path / name)
    for value, said in ((3e38, "predicts? NaN or Inf"), (torch.nan, "NaN or Inf")):
        values["model.norm.weight"][:] = value
        safetensors.torch.save_file(values, tmp_path / name / "model.safetensors", {"format": "pt"})
        with pytest.raises(SlideSparseError, match=said):
            recover(tmp_path / "pruned", tmp_path / "base", tmp_path / "out", options(tmp_path))
        assert not (tmp_path / "out.partial").exists()


def test_a_result_without_numbers_is_none(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, calls = Training.evaluate, []

    def overflows(self: Training) -> dict[str, float]:
        calls.append(evaluate(self))
        return calls[-1] if len(calls) == 1 else {**calls[-1], "kl": torch.inf}

    monkeypatch.setattr(Training, "evaluate", overflows)
    with pytest.raises(InputError, match=r"training ended in NaN or Inf; got kl inf, .*; use a lower --lr"):
        recover(pair / "pruned", pair / "base", tmp_path / "out", options(pair, steps=1))
    assert not (tmp_path / "out").exists()


def test_refusals_come_before_the_text_is_read(pair: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is the source or lies inside it"):
        recover(pair / "pruned", pair / "base", pair / "base/out", options(pair, texts=("missing.txt",)))
    values = tensors(pair / "pruned")
    shutil.copytree(pair / "pruned", tmp_path / "pruned")
    values["model.layers.1.mlp.down_proj.weight"][:] = 1
    safetensors.torch.save_file(values, tmp_path / "pruned/model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"down_proj\.weight violates 2:4"):
        recover(tmp_path / "pruned", pair / "base", tmp_path / "out", options(pair, texts=("missing.txt",)))
    for name in values:
        if "_proj" in name:
            values[name] = torch.zeros_like(values[name]) if "q_proj" in name else torch.ones_like(values[name])
    safetensors.torch.save_file(values, tmp_path / "pruned/model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="is not pruned; got no zeros"):  # one that is all zero shows no pattern
        recover(tmp_path / "pruned", pair / "base", tmp_path / "out", options(pair, texts=("missing.txt",)))


def test_models_and_texts_that_cannot_be_used(pair: Path, tmp_path: Path) -> None:
    make_w8a8(pair / "base", tmp_path / "int8")
    (tmp_path / "short.txt").write_text("a few words")
    refused(pair, "is pruned itself; needed the model before pruning", CheckpointError, dense=pair / "pruned")
    refused(pair, "--window; got 4096 tokens; needed at most 2048", window=4096, batch=8192, tokens=8192)
    refused(pair, "is quantised; needed weights in a float type", CheckpointError, pruned=tmp_path / "int8")
    refused(pair, "--tokens; got 100; needed 256 or more, those of a step", tokens=100)
    said = r"short.txt is too short; got 11 tokens, 0 windows of 32; needed two windows"
    refused(pair, said, texts=(str(tmp_path / "short.txt"),))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"texts": ()}, "nothing to train on"),
        ({"tokens": None}, "the budget; needed tokens or minutes"),
        ({"rounding": "6bit"}, "--rounding 6bit; got --dtype None"),
        *(({name: value}, f"--{name}; got") for name, value in (("window", 1), ("lr", -1.0), ("batch", 16))),
        *(({name: value}, f"--{name}; got") for name, value in (("tokens", 10**16), ("lr", 1e9), ("batch", 1 << 60))),
        *(({"train": "some"}, "--train; got"), ({"eval_windows": 0}, "--eval-windows; got")),
    ],
)
def test_options_that_cannot_be_used(pair: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        options(pair, **changes)


def test_a_full_disk_keeps_the_last_state(pair: Path, tmp_path: Path, monkeypatch: Any) -> None:
    saved: list[Path] = []

    def full(path: Path, values: Any) -> None:
        if len(saved) == 2:
            raise OSError(28, "No space left on device")
        saved.append(path)
        write_tensors(path, values)

    wanted = options(pair, save_minutes=1e-9)
    with monkeypatch.context() as patch:
        patch.setattr(state, "write_tensors", full)
        with pytest.raises(CheckpointError, match=r"the disk of .* is full; got No space left"):
            recover(pair / "pruned", pair / "base", tmp_path / "out", wanted)
    assert [one.name for one in (tmp_path / "out.partial/kept").glob("step-*")] == ["step-00000002"]
    assert recover(pair / "pruned", pair / "base", tmp_path / "out", wanted).steps == 6


def test_a_gpu_that_is_too_small_says_how_much_is_needed(monkeypatch: Any) -> None:
    from slidesparse.recovery.memory import Size, fit_memory

    config = transformers.LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)
    size = Size(8_000_000_000, 7_000_000_000, config)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80e9, 80e9))
    wanted = RecoverOptions(("t",), tokens=65536)
    with pytest.raises(
        UnsupportedError, match=r"too small to train 8 G parameters .*; needed about 1\d\d GB; use more"
    ):
        fit_memory(size, wanted, 1, torch.device("cuda", 0))
    assert fit_memory(size, wanted, 8, torch.device("cuda", 0)).gradient_checkpointing
    small = Size(
        500_000_000,
        360_000_000,
        transformers.Qwen2Config(hidden_size=896, intermediate_size=4864, num_hidden_layers=24),
    )
    assert fit_memory(small, wanted, 1, torch.device("cuda", 0)).micro_batch == 16
    assert not fit_memory(small, wanted, 1, torch.device("cuda", 0)).gradient_checkpointing
