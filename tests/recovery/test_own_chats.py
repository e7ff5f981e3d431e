"""Chats that a model writes itself."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from checkpoints import add_tokenizer, make_checkpoint, write_text
from rank_processes import run_ranks

from slidesparse.base import progress
from slidesparse.base.ranks import Ranks
from slidesparse.cli import main
from slidesparse.errors import CheckpointError, InputError
from slidesparse.recovery import answers, own_chats, vllm_answers
from slidesparse.recovery.decode_attention import NAME, use_decode_attention
from slidesparse.recovery.own_chats import ChatOptions, kept_chats, write_chats
from slidesparse.recovery.tasks import EVERY, FORMS, QUESTIONS, Documented, make_tasks

TEMPLATE = "{% for one in messages %}({{ one.role }}) {{ one.content }}\n{% endfor %}(assistant) "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder / "base")
    add_tokenizer(folder / "base")
    (folder / "base/chat_template.jinja").write_text(TEMPLATE)
    (folder / "prompts.txt").write_text("What is a window?\n\nName four weights, and then some more of them.\nWhy?\n")
    return folder


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_prompt_gets_an_answer_of_its_own(model: Path, tmp_path: Path) -> None:
    wanted = ChatOptions(5, str(model / "prompts.txt"), longest=8)
    assert write_chats(model / "base", tmp_path / "chats.jsonl", wanted, "cpu") == 5
    found = [one["messages"] for one in lines(tmp_path / "chats.jsonl")]
    assert [one[0]["content"] for one in found][:3] == [
        "What is a window?",
        "Name four weights, and then some more of them.",
        "Why?",
    ]
    assert all([one["role"] for one in chat] == ["user", "assistant"] for chat in found)
    assert all(0 < len(chat[1]["content"]) <= 8 for chat in found)
    assert len({chat[1]["content"] for chat in found}) > 1
    with pytest.raises(InputError, match="exists; remove it"):
        write_chats(model / "base", tmp_path / "chats.jsonl", wanted, "cpu")


def test_what_a_model_has_no_room_for_is_said(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    most = json.loads((model / "base/config.json").read_text())["max_position_embeddings"]
    with pytest.raises(InputError, match=f"less than the {most} tokens"):
        write_chats(model / "base", tmp_path / "chats.jsonl", ChatOptions(1, longest=most), "cpu")
    assert not list(tmp_path.iterdir())
    wanted = ChatOptions(3, str(model / "prompts.txt"), longest=most - 30)
    write_chats(model / "base", tmp_path / "chats.jsonl", wanted, "cpu")
    assert "of 2 prompts only the last 30 tokens are read" in caplog.text


def test_padding_does_not_change_what_is_answered(model: Path, monkeypatch: Any) -> None:
    """Greedy answers to prompts of several lengths are those to each alone."""
    import transformers

    monkeypatch.setattr(answers, "asdict", lambda _: {"do_sample": False, "temperature": None, "min_p": None})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model / "base", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model / "base")
    monkeypatch.setattr(loaded, "generate", without_sampling(loaded.generate))
    prompts = [[5, 6, 7], [9], [4, 8, 15, 16, 23, 42]]
    notes: list[str] = []
    together = answers._answered(loaded, tokenizer, prompts, 6, lambda _, note: notes.append(note))
    assert notes == [f"3 at once, token {i} of 6" for i in range(1, 7)]
    assert together == [answers._answered(loaded, tokenizer, [one], 6, lambda *_: None)[0] for one in prompts]


def test_grouped_heads_answer_as_pytorchs_attention_does(model: Path) -> None:
    """Greedy answers to padded prompts, where keys have fewer heads than queries."""
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model / "base", dtype=torch.float32)
    assert loaded.config.num_key_value_heads < loaded.config.num_attention_heads
    ids = torch.tensor([[0, 0, 5, 6, 7], [4, 8, 15, 16, 23]])
    how = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1] * 5]), "max_new_tokens": 6, "pad_token_id": 0}
    how |= {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    before = loaded.generate(ids, **how)
    use_decode_attention(loaded)
    after = loaded.generate(ids, **how)
    assert loaded.config._attn_implementation == NAME
    assert torch.equal(before.sequences, after.sequences)
    torch.testing.assert_close(torch.stack(after.logits), torch.stack(before.logits))


def without_sampling(generate: Any) -> Any:
    def greedy(*args: Any, **named: Any) -> Any:
        return generate(*args, **{**named, "do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50})

    return greedy


def test_they_are_kept(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = ChatOptions(3, str(model / "prompts.txt"), longest=4)
    first = kept_chats(model / "base", wanted, "cpu")
    monkeypatch.setattr("slidesparse.recovery.own_chats.write_answers", None)
    assert kept_chats(model / "base", wanted, "cpu") == first
    assert first.is_relative_to(tmp_path)
    with pytest.raises(TypeError):  # another number is another file
        kept_chats(model / "base", ChatOptions(2, str(model / "prompts.txt"), longest=4), "cpu")
    monkeypatch.setattr(Ranks, "gather", lambda self, own: [own] * self.world)
    assert kept_chats(model / "base", wanted, "cpu", Ranks(world=2)) == first  # whoever wrote it


def interrupted_at(monkeypatch: Any, module: Any, name: str, number: int) -> list[Any]:
    """Interrupt a call of a function, counted from 0; return the arguments of all calls, which grows."""
    calls: list[Any] = []
    run = getattr(module, name)

    def once(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        if len(calls) - 1 == number:
            raise KeyboardInterrupt
        return run(*arguments, **named)

    monkeypatch.setattr(module, name, once)
    return calls


def test_an_interrupted_run_goes_on_and_has_the_same_bytes(
    model: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(answers, "MOST_AT_ONCE", 2)
    words = ["chats", str(model / "base"), "--prompts", str(model / "prompts.txt"), "--device", "cpu"]
    words += ["--number", "5", "--longest", "8"]
    assert main([*words, str(tmp_path / "whole.jsonl")]) == 0
    out = tmp_path / "chats.jsonl"
    calls = interrupted_at(monkeypatch, answers, "_answered", 2)
    assert main([*words, str(out)]) == 130
    assert "chats.jsonl.partial keeps 4 answers, and the same command goes on" in capsys.readouterr().err
    assert not out.exists()
    (tmp_path / "chats.jsonl.partial/kept/answers-0-4.json.5a.tmp").write_text('["half a li')  # as a kill leaves it
    assert main([*words, "--seed", "1", str(out)]) == 1
    assert "got another --seed; repeat that run, choose another destination, or remove" in capsys.readouterr().err
    assert len(calls) == 3
    assert json.loads((tmp_path / "chats.jsonl.partial/plan.json").read_bytes())["processes"] == 1
    assert main([*words, str(out)]) == 0
    assert "4 of 5 answers are there" in capsys.readouterr().err
    assert len(calls) == 4
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["chats.jsonl", "whole.jsonl"]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A vLLM of this process, that answers two prompts at a time with their lengths."""

    class Engine:
        seeds: ClassVar[list[int]] = []

        def __init__(self, seed: int, **_: Any) -> None:
            self.seeds.append(seed)

        def generate(self, batch: Any, *_: Any, **__: Any) -> Any:
            texts = (f"{len(one['prompt_token_ids'])} tokens" for one in batch)
            return [SimpleNamespace(outputs=[SimpleNamespace(text=text)]) for text in texts]

    def in_this_process(words: list[str], **_: Any) -> Any:
        try:
            vllm_answers.main(Path(words[-1]))
        except (RuntimeError, SystemExit) as error:
            return SimpleNamespace(returncode=1, stdout=str(error))
        return SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Engine, SamplingParams=dict))
    monkeypatch.setattr(answers.subprocess, "run", in_this_process)
    monkeypatch.setattr(vllm_answers, "AT_ONCE", 2)
    return Engine


def test_answers_of_vllm_are_kept_batch_by_batch(model: Path, tmp_path: Path, monkeypatch: Any, engine: Any) -> None:
    wanted = ChatOptions(5, str(model / "prompts.txt"), longest=8, writer="vllm")
    calls = interrupted_at(monkeypatch, engine, "generate", 1)
    with pytest.raises(KeyboardInterrupt, match="keeps 2 answers"):
        write_chats(model / "base", tmp_path / "chats.jsonl", wanted, "cpu")
    assert write_chats(model / "base", tmp_path / "chats.jsonl", wanted, "cpu") == 5
    assert [len(batch) for _, batch, *_ in calls] == [2, 2, 2, 1]
    assert engine.seeds == [0, 2]
    found = [one["messages"] for one in lines(tmp_path / "chats.jsonl")]
    asked = [f"(user) {chat[0]['content']}\n(assistant) " for chat in found]
    assert [chat[1]["content"] for chat in found] == [f"{len(text)} tokens" for text in asked]


def test_a_log_says_how_far_a_batch_is(model: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    words = ["chats", str(model / "base"), str(tmp_path / "chats.jsonl"), "--prompts", str(model / "prompts.txt")]
    assert main([*words, "--number", "3", "--longest", "2", "--device", "cpu"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("answers: ")]
    assert said == [
        "answers: 0/3 answers",
        *(f"answers: 0/3 answers, 3 at once, token {i} of 2" for i in (1, 2)),
        "answers: 3/3 answers",
    ]


def test_answers_of_vllm_are_counted_while_it_runs(
    model: Path, tmp_path: Path, monkeypatch: Any, engine: Any, capsys: Any
) -> None:
    monkeypatch.setattr(answers, "LOOK_S", 0.01)
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    generate = engine.generate
    monkeypatch.setattr(engine, "generate", lambda *given, **named: time.sleep(0.5) or generate(*given, **named))
    wanted = ChatOptions(5, str(model / "prompts.txt"), longest=8, writer="vllm")
    capsys.readouterr()
    write_chats(model / "base", tmp_path / "chats.jsonl", wanted, "cpu")
    said = capsys.readouterr().err
    assert all(f"answers: {count}/5 answers" in said for count in (0, 2, 4, 5))


def test_transformers_goes_on_where_vllm_failed(
    model: Path, tmp_path: Path, monkeypatch: Any, engine: Any, capsys: Any
) -> None:
    """As the error tells to; a vLLM whose command was killed writes nothing more."""
    words = ["chats", str(model / "base"), str(tmp_path / "chats.jsonl"), "--number", "5", "--longest", "8"]
    words += ["--prompts", str(model / "prompts.txt"), "--device", "cpu", "--writer"]
    parents = iter([7, 7, 1])
    monkeypatch.setattr(vllm_answers.os, "getppid", lambda: next(parents))
    assert main([*words, "vllm"]) == 1
    assert "the command that asked was killed" in capsys.readouterr().err
    assert [one.name for one in (tmp_path / "chats.jsonl.partial/kept").iterdir()] == ["answers-0-0.json"]
    assert main([*words, "transformers"]) == 0
    assert "2 of 5 answers are there" in capsys.readouterr().err
    assert sum("tokens" in one["messages"][1]["content"] for one in lines(tmp_path / "chats.jsonl")) == 2


def test_a_file_that_was_made_meanwhile_stays(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(own_chats, "_line", lambda *_: (tmp_path / "chats.jsonl").write_text("mine") and "line")
    with pytest.raises(CheckpointError, match="made by something else meanwhile"):
        write_chats(model / "base", tmp_path / "chats.jsonl", ChatOptions(1, longest=4), "cpu")
    assert (tmp_path / "chats.jsonl").read_text() == "mine"


def test_two_processes_write_one_file(model: Path, tmp_path: Path) -> None:
    words = ["chats", model / "base", tmp_path / "chats.jsonl", "--number", 5, "--prompts", model / "prompts.txt"]
    ended = run_ranks(tmp_path, 2, [*words, "--longest", 4, "--device", "cpu"])
    assert [one.status for one in ended] == [0, 0], ended
    assert len(lines(tmp_path / "chats.jsonl")) == 5
    assert ended[0].out.strip().endswith("chats.jsonl: 5 chats")
    assert not list(tmp_path.glob("*.tmp"))


def test_a_model_without_a_chat_template_writes_texts(model: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "base")
    add_tokenizer(tmp_path / "base")
    write_chats(tmp_path / "base", tmp_path / "texts.jsonl", ChatOptions(1, str(model / "prompts.txt"), 4), "cpu")
    (found,) = lines(tmp_path / "texts.jsonl")
    assert found["text"].startswith("What is a window?")


def test_recover_and_prune_take_them(model: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_text(tmp_path / "text.txt", 600)
    base, own = str(model / "base"), ["--self", "40", "--prompts", str(model / "prompts.txt")]
    words = ["prune", base, str(tmp_path / "pruned"), "--pattern", "2:4", "--dtype", "bf16", "--method", "wanda"]
    assert main([*words, *own, "--samples", "8", "--length", "16", "--device", "cpu"]) == 0
    words = ["recover", str(tmp_path / "pruned"), str(tmp_path / "out"), "--dense", base, "--tokens", "512"]
    words += ["--text", f"{tmp_path / 'text.txt'}:2", "--batch", "128", "--window", "32", "--eval-windows", "4"]
    capsys.readouterr()
    assert main([*words, *own, "--device", "cpu", "--lr", "3e-3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == 4
    assert told["after"]["kl"] < told["before"]["kl"]
    assert len(list((tmp_path / "cache/slidesparse/chats").iterdir())) == 1
    assert main([*words, "--prompts", "x", "--json"]) == 1


def test_tasks_are_made_out_of_documentation(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    told = "It does what its name says, to each of the things that it is given, in order."
    functions = [f'def fold_{i}(x, by=2):\n    """Fold in {i}.\n\n    {told}\n    """\n' for i in range(12)]
    functions += [f'def _private(x):\n    """{told}"""\n', 'def bare(x):\n    """Short."""\n']
    functions += [f'class A:\n    def method(self):\n        """{told}"""\n']
    (folder / "folding.py").write_text("\n".join(functions))
    (folder / "broken.py").write_text("def (")
    (folder / "test_folding.py").write_text(functions[0].replace("fold_0", "tested"))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path / "none"), "purelib": str(tmp_path)})
    found = make_tasks(40, seed=1)
    assert len(found) == 40
    assert found == make_tasks(40, seed=1)
    assert len(set(found)) == 40
    assert {name for task in found for name in re.findall(r"fold_\d+|tested|_private|bare|method", task)} == {
        f"fold_{i}" for i in range(12) if any(f"fold_{i}" in task for task in found)
    }
    assert found != make_tasks(40, seed=2)
    more = make_tasks(EVERY * 200)
    short = more[EVERY - 1 :: EVERY]
    assert all((told in task) == (task not in short) for task in more)
    assert all(any(task.startswith(form.partition("{")[0]) for task in short) for form in QUESTIONS)
    assert "{" not in "".join(short)


def test_every_form_asks_about_the_function() -> None:
    one = Documented("fold", "fold(x, by)", "Fold x in two.\n\nReturns half of it.")
    asked = [one.ask(form) for form in FORMS]
    assert all("Fold x in two." in task for task in asked)
    assert "{" not in "".join(asked)
    assert 'def fold(x, by):\n    """Fold x in two.\n\n    Returns half of it.\n    """' in asked[1]
