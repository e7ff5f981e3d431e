"""``slidesparse compress`` on a small model: its parts, what goes on after a kill, what is judged, what is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from checkpoints import SMALL, add_tokenizer, contents, make_checkpoint

import slidesparse as ss
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.marker import Marker
from slidesparse.cli import main
from slidesparse.errors import CheckpointError, InputError
from slidesparse.gemm.select import Choice
from slidesparse.gemm.spec import Route
from slidesparse.gemm.speed import LayerSpeed
from slidesparse.offline.calibrate.calibration import load_tokenizer, tokens_of
from slidesparse.offline.calibrate.chats import Chat
from slidesparse.offline.calibrate.texts import read_documents
from slidesparse.offline.evaluate import load_any
from slidesparse.recovery import compress as module
from slidesparse.recovery import own_chats
from slidesparse.recovery.compress import divide_by_prompt
from slidesparse.recovery.judge import FIRST, Figure, _mean, judge, speeds

TEMPLATE = "{% for one in messages %}({{ one.role }}) {{ one.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}(assistant) {% endif %}"


def chat(question: str, answer: str) -> Chat:
    return Chat([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, chats of its use, and a copy pruned in one shot."""
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder / "base", "qwen2", max_position_embeddings=128)
    add_tokenizer(folder / "base")
    (folder / "base/chat_template.jinja").write_text(TEMPLATE)
    chats = [chat(f"What is {i} windows?", f"It is {4 * i} weights of which {2 * i} are kept. " * 2) for i in range(99)]
    lines = [json.dumps({"messages": [*one]}) for one in (*chats, chats[0])]
    (folder / "chats.jsonl").write_text("\n".join(lines), encoding="utf-8")
    ss.prune(folder / "base", folder / "pruned", "2:4", dtype="int8", method="magnitude")
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast machine, on which a second is left to train, on however little text."""
    monkeypatch.setattr(module, "LEAST_TOKENS", 1)
    monkeypatch.setattr(module, "operations_a_second", lambda *_: 1e18)
    monkeypatch.setattr("slidesparse.offline.estimate.operations_a_second", lambda *_: 1e18)
    monkeypatch.setattr("slidesparse.offline.estimate.column_seconds", lambda *_: 0.0)
    monkeypatch.setattr(module, "LADDER", ((8, 2), (4, 0)))
    monkeypatch.setattr(module, "recover", partial(module.recover, batch=2048))
    monkeypatch.setattr(module._Run, "left", lambda *_: 1.0)


def words(model: Path, out: Path, *more: str) -> list[str]:
    files = [str(model / "base"), str(out), "--chats", str(model / "chats.jsonl"), "--device", "cpu"]
    return ["compress", *files, "--pattern", "4:6", "--rounding", "6bit", *more]


def test_a_killed_run_goes_on_and_ends_in_a_table(
    model: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, train = tmp_path / "out", module.recover
    for name, minutes in (("recover", "60"), ("judge", "90")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt()))
            assert main([*words(model, out), "--minutes", minutes]) == 130
        assert "the same command goes on from there" in capsys.readouterr().err
    assert main([*words(model, out), "--pattern", "2:4"]) == 1
    assert "got a difference in pattern" in capsys.readouterr().err
    kept = contents(tmp_path / "out.partial/output")
    monkeypatch.setattr(module, "prune", None)  # pruned, trained and rounded before
    assert main(words(model, out, "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert {name: one for name, one in contents(out).items() if name != "report.md"} == kept
    marker = Marker.require(Checkpoint(out / "served").config, out)
    assert str(marker.pattern) == "4:6"
    assert json.loads((out / "recovered/recover.json").read_text())["options"]["minutes"] == pytest.approx(
        1 / 60, rel=0.1
    )
    assert "times the chats, KL" in told["lines"][2]
    assert [one.split(":")[0] for one in told["lines"][:5]] == ["chats", "prune", "recover", "round", "judge"]
    assert "2 steps of matching" in told["lines"][1]
    page = (out / "report.md").read_text()
    assert "| perplexity | " in page
    assert str(tmp_path) not in page
    assert train.keywords == {"batch": 2048}


def test_what_the_minutes_do_not_suffice_for_is_left_out(
    model: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAST_TOKENS", math.inf)
    monkeypatch.setattr("slidesparse.offline.estimate.operations_a_second", lambda *_: 1e9)
    done = ss.compress(
        model / "base", tmp_path / "out", "2:4", chats=str(model / "chats.jsonl"), device="cpu", minutes=0.05
    )
    assert "no training" in done.lines[1]
    assert "no matching" in done.lines[1]
    assert sorted(one.name for one in (tmp_path / "out").iterdir() if one.is_dir()) == ["served"]


def test_pruning_on_more_windows_comes_before_training(
    model: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time for 4 windows and training is better spent on 8 windows."""
    monkeypatch.setattr(module, "estimate_seconds", lambda plan, _: len(plan.layers.windows))
    monkeypatch.setattr(module._Run, "left", lambda *_: 600.0)
    how = {"chats": str(model / "chats.jsonl"), "device": "cpu", "minutes": 0.3}
    told = ss.compress(model / "base", tmp_path / "out", "2:4", **how).lines[1]
    assert "8 windows" in told
    assert "no training: pruning and rounding would take less than a minute, more than a half of the minutes" in told


def test_few_chats_are_read_a_few_times_alone_and_time_is_left_to_round(
    model: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module._Run, "left", lambda *_: 600.0)
    monkeypatch.setattr(module, "estimate_seconds", lambda *_: 30.0)
    monkeypatch.setitem(module.UNCOUNTED, "cpu", 60)
    done = ss.compress(
        model / "base", tmp_path / "out", "2:4", chats=str(model / "chats.jsonl"), device="cpu", minutes=60
    )
    options = json.loads((tmp_path / "out/recovered/recover.json").read_text())["options"]
    assert options["minutes"] == (600 - 30 - 60) / 60
    text = len(tokens_of(read_documents(tmp_path / "out/training.jsonl"), load_tokenizer(model / "base")))
    assert options["tokens"] == module.MOST_READINGS * text
    assert re.search(r" 3[12]\.\d times the chats", done.lines[2])


def test_a_part_is_told_with_the_time_that_it_took(
    model: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with its estimate, which is of days here; and chats without answers are told."""
    monkeypatch.setattr("slidesparse.offline.estimate.operations_a_second", lambda *_: 1e4)
    prompt = {"messages": [{"role": "user", "content": "Why?"}]}
    more = "".join(f"\n{json.dumps(one)}" for one in (prompt, {"text": "No chat."}))
    (tmp_path / "chats.jsonl").write_text((model / "chats.jsonl").read_text() + more)
    how = {"chats": str(tmp_path / "chats.jsonl"), "device": "cpu", "minutes": 1e6}
    read, told = ss.compress(model / "base", tmp_path / "out", "2:4", **how).lines[:2]
    assert read.startswith("chats: 100 read, 2 others without answers left out (")
    assert "Why?" not in (tmp_path / "out/training.jsonl").read_text()
    found = re.search(r"\(([0-9.]+) minutes\)$", told)
    assert found
    assert float(found[1]) < 30


def test_minutes_that_do_not_suffice_at_all_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slidesparse.offline.estimate.operations_a_second", lambda *_: 1.0)
    for how in ({"minutes": 1}, {"minutes": -1}, {"prompts": "chats.txt"}, {"rounding": "6bit", "dtype": "fp8"}):
        with pytest.raises(InputError):
            ss.compress(model / "base", tmp_path / "out", "2:4", chats=str(model / "chats.jsonl"), device="cpu", **how)
    with pytest.raises(InputError, match="slidesparse prune"):
        ss.compress(model / "base", tmp_path / "out", "dense", chats=str(model / "chats.jsonl"), device="cpu")
    with pytest.raises(CheckpointError, match="quantised or pruned"):
        ss.compress(model / "pruned", tmp_path / "out", "2:4", chats=str(model / "chats.jsonl"), device="cpu")
    shutil.copytree(model / "base", tmp_path / "base")
    (tmp_path / "base/chat_template.jinja").unlink()
    with pytest.raises(InputError, match=r"^the tokenizer has no chat template; needed"):
        ss.compress(tmp_path / "base", tmp_path / "out", "2:4", chats=str(model / "chats.jsonl"), device="cpu")
    assert [one.name for one in tmp_path.iterdir()] == ["base"]


def test_too_few_prompts_are_told_before_an_answer(
    model: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "write_chats_apart", None)
    (tmp_path / "prompts.txt").write_text("What is a window?\n" * 20)
    how: Any = {"minutes": 4, "prompts": str(tmp_path / "prompts.txt"), "device": "cpu"}
    with pytest.raises(InputError, match="got 1; needed 16 or more"):
        ss.compress(model / "base", tmp_path / "out", "2:4", **how)


def test_no_prompt_is_trained_on_and_judged(model: Path) -> None:
    chats: list[Any] = read_documents(model / "chats.jsonl")
    training, held_out = divide_by_prompt(chats)
    asked, judged = ([one[0]["content"] for one in some] for some in (training, held_out))
    assert len(judged) == len(set(judged)) == 99 // 4
    assert not {*asked} & {*judged}
    assert {*asked, *judged} == {one[0]["content"] for one in chats}
    with pytest.raises(InputError, match="16 or more"):
        divide_by_prompt([chats[0]] * 100)


def test_figures_are_those_of_the_definitions(model: Path) -> None:
    chats: list[Any] = read_documents(model / "chats.jsonl")[:5]
    words, figures = judge(model / "base", model / "pruned", chats, torch.device("cpu"), 120, 60.0)
    tokenizer = load_tokenizer(model / "base")
    pruned, dense = (load_any(Checkpoint(model / name), torch.device("cpu")) for name in ("pruned", "base"))
    rows = []
    for one in chats:
        ids = tokens_of([one], tokenizer)[None, :120]
        start = len(tokenizer(f"(user) {one[0]['content']}\n(assistant) ", add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            log_q, log_p = (net(ids).logits[0, start - 1 : -1].double().log_softmax(-1) for net in (pruned, dense))
        same, picked = log_q.argmax(-1) == log_p.argmax(-1), ids[0, start:, None]
        losses = [-log.gather(1, picked).sum() for log in (log_q, log_p)]
        kl = log_p.exp().mul(log_p - log_q).sum()
        rows.append(torch.stack([kl, *losses, same.sum(), same[:FIRST].all(), torch.tensor(len(picked))]))
    kl, ours, theirs, agreed, alike, count = torch.stack(rows).sum(0).tolist()
    perplexity, rise, divergence, next_token, answers = figures
    both = math.exp(theirs / count), math.exp(ours / count)
    assert (perplexity.dense, perplexity.compressed) == pytest.approx(both, rel=1e-3)
    assert rise.compressed == pytest.approx(100 * (perplexity.compressed / perplexity.dense - 1), rel=1e-6)
    assert divergence.compressed == pytest.approx(kl / count, rel=1e-3)
    assert next_token.compressed == pytest.approx(100 * agreed / count)
    assert answers.compressed == pytest.approx(100 * alike / 5)
    assert words == f"5 answers of {count:.0f} tokens"
    for figure in judge(model / "base", model / "base", chats, torch.device("cpu"), 120, 0.0)[1][1:]:
        assert (figure.compressed, figure.error) in ((0.0, 0.0), (100.0, 0.0))


def test_an_error_is_that_of_a_mean_over_answers() -> None:
    sums, counts = torch.tensor([4.0, 6.0, 5.0]).double(), torch.full((3,), 10.0).double()
    assert _mean(sums, counts) == pytest.approx((0.5, 0.1 / math.sqrt(3)))


def test_chats_take_what_an_interrupted_run_has_left_of_their_minutes(
    model: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed one ran until its last file; what came after it does not count."""
    given: list[float] = []

    def write(*how: Any) -> None:
        given.append(how[-1])
        time.sleep(0.35)  # times of files are some milliseconds old
        if len(given) == 1:
            (tmp_path / "out.partial/output/answers").touch()
            shutil.copytree(tmp_path / "out.partial", tmp_path / "killed.partial")
            time.sleep(0.3)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_chats_apart", write)
    for out in ("out", "out", "killed"):
        with pytest.raises(KeyboardInterrupt):
            ss.compress(model / "base", tmp_path / out, "2:4", minutes=4, device="cpu")
    whole, interrupted, killed = given
    assert whole == 1
    assert interrupted + 0.3 / 60 <= killed <= whole - 0.3 / 60


@pytest.mark.parametrize("error", [KeyboardInterrupt(), InputError("a part", got="an error")])
def test_other_minutes_keep_what_was_made(
    model: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    out, how = tmp_path / "out", {"chats": str(model / "chats.jsonl"), "device": "cpu"}

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module, "judge", fail)
        with pytest.raises(type(error)):
            ss.compress(model / "base", out, "4:6", minutes=12, **how)
    kept = contents(tmp_path / "out.partial/output")
    for name in ("prune", "recover", "divide_by_prompt"):
        monkeypatch.setattr(module, name, None)
    ss.compress(model / "base", out, "4:6", minutes=15, **how)
    assert {name: one for name, one in contents(out).items() if name != "report.md"} == kept


@pytest.mark.slow
def test_it_writes_chats_where_none_are_given(
    model: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As few as may be, since each batch of them takes longer than there is, however fast this machine is."""
    monkeypatch.setattr(own_chats, "time", SimpleNamespace(monotonic=count(step=60).__next__))
    shutil.copy(model / "chats.jsonl", tmp_path / "prompts.jsonl")
    done = ss.compress(
        model / "base", tmp_path / "out", "4:6", minutes=0.01, prompts=str(tmp_path / "prompts.jsonl"), device="cpu"
    )
    assert len(read_documents(tmp_path / "out/chats.jsonl")) == 32
    assert done.lines[0].startswith("chats: 32 written by the dense model")


@pytest.mark.slow
def test_layers_of_experts_are_not_matched(model: Path, tmp_path: Path, quick: None) -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**{**SMALL, "num_local_experts": 4, "max_position_embeddings": 128})
    transformers.MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    add_tokenizer(tmp_path / "base")
    (tmp_path / "base/chat_template.jinja").write_text(TEMPLATE)
    how = {"chats": str(model / "chats.jsonl"), "rounding": "6bit", "device": "cpu"}
    done = ss.compress(tmp_path / "base", tmp_path / "out", "2:4", **how)
    assert "no matching of layers, which have experts" in done.lines[1]
    assert [one.split(":")[0] for one in done.lines[:5]] == ["chats", "prune", "recover", "round", "judge"]


def test_the_speed_is_that_of_all_linears_together() -> None:
    us = [{"dense": (4.0,), "hopper": (1.0,)}, {"dense": (4.0,), "hopper": (3.0,)}]
    layers = [LayerSpeed("int8", 64, 64, (16,), times) for times in us]
    choices = [Choice((Route(0, "hopper"),), "measured", layer) for layer in layers]
    assert speeds(choices) == [Figure("speed of the linears here, 16 tokens", 1.0, 2.0)]
    assert speeds([Choice((Route(0, "dense"),), "no GPU")]) == []
