"""Chats that a model writes itself."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from checkpoints import add_tokenizer, edited_config, make_checkpoint, reverse_letters, write_text
from small_models import make

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.cli import main
from slidesparse.errors import CheckpointError, InputError, UnsupportedError
from slidesparse.offline.calibrate.calibration import load_tokenizer, tokens_of
from slidesparse.offline.calibrate.texts import read_documents
from slidesparse.recovery.own_chats import ChatOptions, write_chats, write_chats_apart
from slidesparse.recovery.prompts import FORMS, make_prompts
from slidesparse.recovery.writers import SAMPLING, TransformersWriter, VllmWriter, end_tokens, writer_class

TEMPLATE = "{% for one in messages %}({{ one.role }}) {{ one.content }}\n{% endfor %}(assistant) "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder / "base")
    add_tokenizer(folder / "base")
    (folder / "base/chat_template.jinja").write_text(TEMPLATE)
    (folder / "prompts.txt").write_text("What is a window?\n\nName four weights, and then some more of them.\nWhy?\n")
    return folder


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for writer in (TransformersWriter, VllmWriter):
        monkeypatch.setattr(writer, "at_once", 2)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_each_prompt_gets_an_answer_of_its_own(model: Path, tmp_path: Path) -> None:
    wanted = ChatOptions(5, str(model / "prompts.txt"), max_tokens=8)
    write_chats(model / "base", tmp_path / "chats.jsonl", wanted, "cpu")
    found = [one["messages"] for one in lines(tmp_path / "chats.jsonl")]
    asked = ["What is a window?", "Name four weights, and then some more of them.", "Why?"]
    assert [one[0]["content"] for one in found] == [*asked, *asked[:2]]
    assert all([one["role"] for one in chat] == ["user", "assistant"] for chat in found)
    assert all(len(chat[1]["content"]) <= 8 for chat in found)
    assert len({chat[1]["content"] for chat in found}) == 5
    with pytest.raises(InputError, match="exists; remove it"):
        write_chats(model / "base", tmp_path / "chats.jsonl", wanted, "cpu")
    assert [one.name for one in tmp_path.iterdir()] == ["chats.jsonl"]


def test_fewer_chats_where_the_minutes_are_spent(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "chats.jsonl"
    words = ["chats", str(model / "base"), str(out), "--count", "40", "--max-tokens", "4"]
    words += ["--prompts", str(model / "prompts.txt"), "--device", "cpu", "--minutes"]
    assert main([*words, "0"]) == 1
    calls = interrupted_at(monkeypatch, TransformersWriter, 99)
    for first, minutes, count, sizes in (
        (2048, "1e-6", 32, [16, 16]),
        (2048, "99", 40, [16, 16, 8]),
        (8, "99", 40, [8, 16, 16]),  # before the time of an answer is known
    ):
        monkeypatch.setattr("slidesparse.recovery.own_chats.FIRST", first)
        calls.clear()
        assert main([*words, minutes]) == 0
        assert f"{count} chats" in capsys.readouterr().out
        assert len(lines(out)) == count
        assert calls == sizes
        out.unlink()


def test_a_prompt_is_a_whole_chat_up_to_the_users_last_message(model: Path, tmp_path: Path) -> None:
    said = [("system", "Be short."), ("user", "Hello"), ("assistant", "Hi"), ("user", "Why?"), ("assistant", "So.")]
    chat = [{"role": role, "content": content} for role, content in said]
    no_user = [{"role": "system", "content": "Be short."}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in (chat, no_user)))
    write_chats(model / "base", tmp_path / "out.jsonl", ChatOptions(2, str(tmp_path / "prompts.jsonl"), 4), "cpu")
    for one in lines(tmp_path / "out.jsonl"):
        assert one["messages"][:-1] == chat[:-1]
        assert one["messages"][-1]["role"] == "assistant"
    (tmp_path / "none.jsonl").write_text(json.dumps({"messages": no_user}))
    with pytest.raises(InputError, match="holds no prompts"):
        write_chats(model / "base", tmp_path / "x.jsonl", ChatOptions(2, str(tmp_path / "none.jsonl"), 4), "cpu")


def test_what_a_model_cannot_take_is_said(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(model / "base", tmp_path / "base")
    config = json.loads((model / "base/config.json").read_text()) | {"max_position_embeddings": 40}
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="less than 40"):
        write_chats(tmp_path / "base", tmp_path / "chats.jsonl", ChatOptions(1, max_tokens=40), "cpu")
    assert [one.name for one in tmp_path.iterdir()] == ["base"]
    write_chats(tmp_path / "base", tmp_path / "chats.jsonl", ChatOptions(3, str(model / "prompts.txt"), 10), "cpu")
    assert "2 prompts are cut to their last 30 tokens" in caplog.text
    (tmp_path / "base/chat_template.jinja").unlink()
    with pytest.raises(InputError, match="no chat template"):
        write_chats(tmp_path / "base", tmp_path / "more.jsonl", ChatOptions(1, str(model / "prompts.txt"), 4), "cpu")


def test_padding_does_not_change_what_is_answered(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sampling leaves the likeliest token alone, answers to prompts of several lengths are those to each."""
    monkeypatch.setitem(SAMPLING, "temperature", 1e-4)
    writer = TransformersWriter(model / "base", 99, "cpu", [])
    prompts = [[5, 6, 7], [9], [4, 8, 15, 16, 23, 42]]
    together = writer.answer(prompts, 6, seed=0)
    assert together == [writer.answer([one], 6, seed=1)[0] for one in prompts]
    held: list[Any] = []

    def one_at_a_time(_: Any, args: tuple[torch.Tensor]) -> None:
        assert not [one for one in held if one() is not None]  # the error before holds no tensors any more
        if len(args[0]) > 1:
            held.append(weakref.ref(args[0]))
            raise torch.OutOfMemoryError

    hook = writer.model.model.layers[0].register_forward_pre_hook(one_at_a_time)
    assert writer.answer(prompts, 6, seed=0) == together
    assert (writer.at_once, len(held)) == (1, 1)  # nor are more tried again
    hook.remove()
    (end,) = {together[0][2]}
    writer = TransformersWriter(model / "base", 99, "cpu", [end])
    assert writer.answer(prompts, 6, seed=0)[0] == together[0][: together[0].index(end) + 1]


@pytest.mark.parametrize(
    ("sizes", "least", "most"), [((896, 24, 14, 2), 2048, 9000), ((3584, 28, 28, 4), 600, 2000)], ids=["0.5B", "7B"]
)
def test_as_many_answer_as_fit(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], least: int, most: int) -> None:
    """On a GPU of 139 GiB, of prompts of 300 tokens and answers of 400; ``most`` is counted tensor by tensor."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (139 << 30, 139 << 30))
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = transformers.Qwen2Config(vocab_size=151936, **dict(zip(names, sizes, strict=True)))
    writer: Any = SimpleNamespace(model=SimpleNamespace(config=config, device=0))
    assert least < TransformersWriter._fitting(writer, 700) < most


def interrupted_at(monkeypatch: pytest.MonkeyPatch, writer: type, number: int) -> list[int]:
    """Interrupt a call of ``answer``, counted from 0; return the numbers of prompts of all calls, which grows."""
    calls: list[int] = []
    run = writer.answer  # type: ignore[attr-defined]

    def once(self: Any, prompts: Sequence[list[int]], max_tokens: int, seed: int) -> Any:
        calls.append(len(prompts))
        if len(calls) - 1 == number:
            raise KeyboardInterrupt
        return run(self, prompts, max_tokens, seed)

    monkeypatch.setattr(writer, "answer", once)
    return calls


def test_an_interrupted_run_goes_on_and_has_the_same_bytes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_batches: None, capsys: Any
) -> None:
    words = ["chats", str(model / "base"), "--prompts", str(model / "prompts.txt"), "--device", "cpu"]
    words += ["--count", "5", "--max-tokens", "8"]
    assert main([*words, str(tmp_path / "whole.jsonl")]) == 0
    assert "minutes for the other 3 answers" in capsys.readouterr().err
    out = tmp_path / "chats.jsonl"
    calls = interrupted_at(monkeypatch, TransformersWriter, 2)
    assert main([*words, str(out)]) == 130
    (part,) = tmp_path.glob("chats.jsonl.*.part")
    with part.open("a") as file:
        file.write('{"messages": [{"ro')  # as a kill leaves it
    assert main([*words, str(out)]) == 0
    assert "4 are there from an interrupted run" in capsys.readouterr().err
    assert calls == [2, 2, 1, 1]
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["chats.jsonl", "whole.jsonl"]


def test_two_commands_do_not_write_one_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_batches: None
) -> None:
    interrupted_at(monkeypatch, TransformersWriter, 1)
    wanted = ChatOptions(3, str(model / "prompts.txt"), max_tokens=4)
    with pytest.raises(KeyboardInterrupt):
        write_chats(model / "base", tmp_path / "chats.jsonl", wanted, "cpu")
    (part,) = tmp_path.glob("*.part")
    with part.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="written by another command"):
            write_chats(model / "base", tmp_path / "chats.jsonl", wanted, "cpu")
    assert len(lines(part)) == 2


class SamplingParams:
    """The arguments of vLLM's that are used, which are alike from 0.22.1 to 0.33."""

    def __init__(
        self, *, temperature: float, min_p: float, seed: int | None, max_tokens: int | None, detokenize: bool,
        stop_token_ids: list[int] | None,
    ) -> None:  # fmt: skip
        self.seed = seed
        assert stop_token_ids == [2]


class LLM:
    """The arguments of vLLM's that are used, from 0.22.1 to 0.33. Each answer is its prompt's length and its seed."""

    def __init__(self, model: str, *, dtype: str = "auto", **engine_args: Any) -> None:
        assert Path(model, "config.json").exists()
        assert engine_args.keys() == {"generation_config", "max_model_len", "max_num_seqs", "use_tqdm_on_load"}
        assert engine_args["generation_config"] == "vllm"  # its own settings, not those of a file
        self.length = engine_args["max_model_len"]

    def generate(
        self, prompts: Sequence[dict[str, list[int]]], sampling_params: Sequence[SamplingParams], *, use_tqdm: bool
    ) -> list[Any]:
        assert all(len(one["prompt_token_ids"]) < self.length for one in prompts)
        pairs = zip(prompts, sampling_params, strict=True)
        answers = ((len(one["prompt_token_ids"]), drawn.seed) for one, drawn in pairs)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=answer)]) for answer in answers]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=SamplingParams))


def test_vllm_answers_with_a_seed_for_each(model: Path, vllm: None) -> None:
    writer = VllmWriter(model / "base", 12, "cuda", [2])
    assert writer.answer([[1, 2], [3], [1, 2]], max_tokens=4, seed=7) == [[2, 7], [1, 8], [2, 9]]
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES=1"):
        VllmWriter(model / "base", 12, "cuda:1", [])
    assert writer_class("auto", "cpu") is TransformersWriter


def test_transformers_goes_on_where_vllm_ended(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_batches: None, vllm: None
) -> None:
    interrupted_at(monkeypatch, VllmWriter, 1)
    out, prompts = tmp_path / "chats.jsonl", str(model / "prompts.txt")
    with pytest.raises(KeyboardInterrupt):
        write_chats(model / "base", out, ChatOptions(5, prompts, max_tokens=8, writer="vllm"), "cpu")
    calls = interrupted_at(monkeypatch, TransformersWriter, 9)
    write_chats(model / "base", out, ChatOptions(5, prompts, max_tokens=8, writer="transformers"), "cpu")
    assert calls == [2, 1]
    assert len(lines(out)) == 5


def test_what_was_read_and_written_is_trained_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the prompt opens a thought, the template cuts thoughts off, and the answer has special tokens."""
    shutil.copytree(model / "base", tmp_path / "base")
    thought = "{% for m in messages %}({{ m.role }}) {{ m.content.split('!')[-1] }}\n{% endfor %}"
    opened = "{% if add_generation_prompt %}(assistant) ?{% endif %}"
    (tmp_path / "base/chat_template.jinja").write_text(thought + opened)
    tokenizer = load_tokenizer(tmp_path / "base")
    written = tokenizer("so!<s>yes", add_special_tokens=False)["input_ids"] + [2]
    monkeypatch.setattr(TransformersWriter, "answer", lambda self, prompts, *_: [written for _ in prompts])
    write_chats(tmp_path / "base", out := tmp_path / "chats.jsonl", ChatOptions(2, str(model / "prompts.txt")), "cpu")
    documents = read_documents(out)
    assert [one[-1]["content"] for one in documents] == ["so!yes"] * 2
    text = tokenizer.decode(tokens_of(documents, tokenizer))
    asked = [line for line in (model / "prompts.txt").read_text().split("\n") if line][:2]
    assert text == "".join(f"(user) {one}\n(assistant) ?so!<s>yes</s>" for one in asked)
    # A chat that was changed by hand is read by the template, and so is all of it with another tokenizer.
    out.write_text(out.read_text().replace("window", "wall"))
    changed = tokenizer.decode(tokens_of(read_documents(out), tokenizer))
    assert changed.startswith("(user) What is a wall?\n(assistant) yes\n(user) Name four")
    reverse_letters(tmp_path / "base")
    other = load_tokenizer(tmp_path / "base")
    assert "<s>" not in other.decode(tokens_of(documents, other))


def test_an_answer_ends_where_any_file_says_and_nothing_else_of_a_file_steers_it(model: Path, tmp_path: Path) -> None:
    plain = TransformersWriter(model / "base", 99, "cpu", []).answer([[5, 6, 7]], 12, seed=0)
    shutil.copytree(model / "base", tmp_path / "base")
    steered = {"num_beams": 3, "num_return_sequences": 2, "repetition_penalty": 9.0, "stop_strings": ["a"]}
    steered |= {"max_length": 4, "suppress_tokens": [plain[0][0]], "eos_token_id": [90, 4000], "top_k": 1}
    (tmp_path / "base/generation_config.json").write_text(json.dumps(steered))
    with edited_config(tmp_path / "base") as config:
        config["eos_token_id"] = 80
    ends = end_tokens(Checkpoint(tmp_path / "base"), load_tokenizer(tmp_path / "base"))
    assert ends == [2, 80, 90]  # and none beyond the model's rows
    assert TransformersWriter(tmp_path / "base", 99, "cpu", []).answer([[5, 6, 7]], 12, seed=0) == plain


def test_damaged_answers_are_written_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_batches: None
) -> None:
    wanted, path = ChatOptions(3, str(model / "prompts.txt"), max_tokens=4), tmp_path / "chats.jsonl"

    def written() -> bytes:
        write_chats(model / "base", path, wanted, "cpu")
        whole = path.read_bytes()
        path.unlink()
        return whole

    whole = written()
    interrupted_at(monkeypatch, TransformersWriter, 1)
    with pytest.raises(KeyboardInterrupt):
        written()
    (part,) = tmp_path.glob("*.part")
    first = part.read_bytes()
    for damaged in (
        b"[]\n",
        b"",
        whole.replace(b"window", b"Window"),
        whole[: whole.rindex(b"{")],
        first * 3 + b"[]\n",
    ):
        part.write_bytes(damaged)
        assert written() == whole
    (tmp_path / "other").write_text("of the user")
    part.symlink_to(tmp_path / "other")
    assert written() == whole
    assert (tmp_path / "other").read_text() == "of the user"
    part.write_bytes(first)
    with edited_config(model / "base") as config:  # another end makes other chats
        config["eos_token_id"] = 50
    written()
    assert part.read_bytes() == first
    with edited_config(model / "base") as config:
        config["eos_token_id"] = 2


def test_prompts_are_lines_and_a_template_that_fails_names_one(model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("One\u2028still one\x0cand so on\nTwo", encoding="utf-8")
    write_chats(model / "base", tmp_path / "out.jsonl", ChatOptions(2, str(tmp_path / "p.txt"), 2), "cpu")
    assert [one["messages"][0]["content"] for one in lines(tmp_path / "out.jsonl")] == [
        "One\u2028still one\x0cand so on",
        "Two",
    ]
    shutil.copytree(model / "base", tmp_path / "base")
    (tmp_path / "base/chat_template.jinja").write_text("{{ raise_exception('no') if messages|length > 1 }}x")
    chats = [[{"role": "user", "content": "a"}] * times for times in (1, 2)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))
    with pytest.raises(CheckpointError, match=r"template fails on .*p\.jsonl, line 2"):
        write_chats(tmp_path / "base", tmp_path / "x.jsonl", ChatOptions(2, str(tmp_path / "p.jsonl"), 2), "cpu")


@pytest.mark.parametrize(
    ("name", "value"), [("count", 0), ("count", 10**9), ("max_tokens", 1 << 40), ("seed", -1), ("seed", 2**63)]
)
def test_numbers_that_make_no_sense(name: str, value: int) -> None:
    with pytest.raises(InputError, match=r"; needed [01] to \d"):
        ChatOptions(**{"count": 1, name: value})


def test_a_template_that_writes_nothing(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model / "base", tmp_path / "base")
    (tmp_path / "base/chat_template.jinja").write_text("{{ '' }}")
    with pytest.raises(InputError, match="the chat template writes nothing"):
        write_chats(tmp_path / "base", tmp_path / "x.jsonl", ChatOptions(1, str(model / "prompts.txt"), 2), "cpu")
    assert [one.name for one in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize("name", ["mamba2", "gemma3", "llava"])
def test_models_without_heads_and_with_text_inside_write(model: Path, tmp_path: Path, name: str) -> None:
    make(tmp_path / "base", ARCHITECTURES[name])
    add_tokenizer(tmp_path / "base")
    (tmp_path / "base/chat_template.jinja").write_text(TEMPLATE)
    write_chats(tmp_path / "base", tmp_path / "out.jsonl", ChatOptions(3, str(model / "prompts.txt"), 3), "cpu")
    assert len(lines(tmp_path / "out.jsonl")) == 3


def test_a_vllm_that_fails_is_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm: None
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("Engine core initialization failed")

    monkeypatch.setattr(LLM, "__init__", broken)
    with pytest.raises(UnsupportedError, match=r"initialization failed; .*--writer transformers"):
        write_chats(model / "base", tmp_path / "chats.jsonl", ChatOptions(1, writer="vllm"), "cpu")
    assert not list(tmp_path.iterdir())


def test_vllm_writes_in_a_process_of_its_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm: None
) -> None:
    """The words that it is given are those of the command."""

    def run(words: list[str], **_: Any) -> Any:
        assert words[1:3] == ["-m", "slidesparse"]
        return SimpleNamespace(returncode=main(words[3:]))

    monkeypatch.setattr(subprocess, "run", run)
    wanted = ChatOptions(3, str(model / "prompts.txt"), max_tokens=4, seed=5, writer="vllm")
    write_chats_apart(model / "base", tmp_path / "chats.jsonl", wanted, "cpu")
    assert len(lines(tmp_path / "chats.jsonl")) == 3
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    with pytest.raises(UnsupportedError, match="--writer transformers"):
        write_chats_apart(model / "base", tmp_path / "more.jsonl", wanted, "cpu")


def test_recover_and_prune_take_them(model: Path, tmp_path: Path, capsys: Any) -> None:
    write_text(tmp_path / "text.txt", 600)
    base, chats = str(model / "base"), str(tmp_path / "chats.jsonl")
    write_chats(model / "base", Path(chats), ChatOptions(8, str(model / "prompts.txt")), "cpu")
    words = ["prune", base, str(tmp_path / "pruned"), "--pattern", "2:4", "--dtype", "bf16", "--method", "wanda"]
    words += ["--calibration", chats, "--samples", "8", "--length", "16", "--device", "cpu"]
    assert main(words) == 0
    words = ["recover", str(tmp_path / "pruned"), str(tmp_path / "out"), "--dense", base, "--tokens", "512"]
    words += ["--text", f"{tmp_path / 'text.txt'}:2", "--batch", "128", "--window", "32", "--eval-windows", "4"]
    capsys.readouterr()
    assert main([*words, "--text", chats, "--device", "cpu", "--lr", "3e-3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == 4
    assert told["after"]["kl"] < told["before"]["kl"]


def test_prompts_are_of_many_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path if name == "purelib" else tmp_path / "none"))
    found = make_prompts(600, seed=1)
    assert len(found) == 600
    assert found == make_prompts(600, seed=1) != make_prompts(600, seed=2)
    code = [one for one in found if told in one]
    assert len(code) == 4 * 600 // 20
    names = {name for one in code for name in re.findall(r"fold_\d+(?=\()|tested|_private|bare|method", one)}
    assert names == {f"fold_{i}" for i in range(12)}
    assert sum(one.endswith(tuple(FORMS["steps"])) for one in found) == 5 * 600 // 20
    assert sum(one.endswith(tuple(FORMS["tests"])) for one in found) == 8 * 600 // 20
    for kind in ("questions", "instructions", "arithmetic", "tasks"):
        starts = [form.partition("{")[0] for form in FORMS[kind]]
        assert all(any(one.startswith(start) for one in found) for start in starts)
    assert not [one for one in found if "{" in one or "``` " in one]  # nothing follows a block's end on its line


def test_prompts_are_made_without_any_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert len(set(make_prompts(60))) > 50
