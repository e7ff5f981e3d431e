"""Texts for calibration and perplexity: every kind of file, folders, data sets, chats, and the set that ships."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from checkpoints import add_tokenizer, make_checkpoint, read_text, write_text

from slidesparse.base.log import log_once
from slidesparse.errors import CheckpointError, InputError, UnsupportedError
from slidesparse.offline.calibrate import texts
from slidesparse.offline.calibrate.calibration import Calibration, calibration_windows, load_tokenizer
from slidesparse.offline.calibrate.standard_library import CHARACTERS, LONGEST, standard_library
from slidesparse.offline.calibrate.texts import read_documents
from slidesparse.offline.prune import PruneOptions, prune_checkpoint

CHAT = [{"role": "user", "content": "what is two"}, {"role": "assistant", "content": "a number"}]
TEMPLATE = "{% for m in messages %}({{ m.role }}) {{ m.content }}. {% endfor %}"


class Tokenizer:
    """As much of a tokenizer as a chat needs."""

    def __init__(self, template: str | None = TEMPLATE) -> None:
        self.chat_template = template

    def apply_chat_template(self, chat: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert not add_generation_prompt
        return "|".join(f"{one['role']}: {one['content']}" for one in chat)


def test_chats_by_the_template(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": CHAT, "id": 5}) + "\n" + json.dumps({"text": "plain"}))
    assert read_documents(path) == [CHAT, "plain"]
    assert read_text(path, Tokenizer()) == "user: what is two|assistant: a number\n\nplain"
    for tokenizer in (None, Tokenizer(None)):
        with pytest.raises(InputError, match="the text holds chats, and the tokenizer has no chat template"):
            read_text(path, tokenizer)


@pytest.mark.parametrize(
    "line",
    [
        *({"messages": one} for one in ([], [{"role": "user"}], [{"role": "user", "content": None}])),
        *({"conversations": CHAT}, {"text": None, "messages": None}, {"text": 5}, {"text": ["a"]}, []),
        "[" * 100_000,
    ],
    ids=lambda line: str(line)[:40],
)
def test_what_is_no_document(tmp_path: Path, line: Any) -> None:
    content = line if isinstance(line, str) else json.dumps(line)
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n' + content)
    with pytest.raises(InputError, match=r"c\.jsonl, line 2"):
        read_documents(tmp_path / "c.jsonl")


CALL = {"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLED = [
    {"role": "user", "content": [{"type": "text", "text": "what is"}, {"type": "text", "text": "two"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm", "weight": 1, "name": None},
]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


@pytest.mark.parametrize("kind", ["jsonl", "json", "strings"])
def test_whole_messages_and_tools_go_to_the_template(tmp_path: Path, kind: str, caplog: Any) -> None:
    log_once.cache_clear()
    add_tokenizer(tmp_path)
    said = "{{ tools|tojson if tools }}{% for m in messages %}{{ m.content }}"
    called = "{{ m.thinking }}{{ m.tool_calls[0].function.arguments.a if m.tool_calls }}|{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(said + called)
    one = {"text": None, "messages": TOOLED, "tools": json.dumps(TOOLS) if kind == "strings" else TOOLS}
    path = tmp_path / ("c.json" if kind == "json" else "c.jsonl")
    path.write_text(json.dumps([one] if kind == "json" else one))
    assert read_text(path, load_tokenizer(tmp_path)) == f"{json.dumps(TOOLS)}what is\ntwo|hm1|"
    assert "does not read 'weight'" in caplog.text
    assert "reasoning" not in caplog.text
    assert "'name'" not in caplog.text
    for arguments in ("{", '"a"', "5"):  # are no object, and stay as they are
        called = {"function": {"name": "add", "arguments": arguments}}
        path = tmp_path / "d.jsonl"
        path.write_text(json.dumps({"messages": [{"role": "assistant", "tool_calls": [called]}]}))
        assert read_documents(path) == [[{"role": "assistant", "tool_calls": [called]}]]
    path.write_text(json.dumps({"messages": TOOLED, "tools": "{"}))
    with pytest.raises(InputError):
        read_documents(path)


LONG = json.dumps({"messages": [*CHAT * 50, "hello"]}).encode()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"text": "a"}\n' + LONG, 'line 2; got .*; needed an object such as {"text"'),
        (
            b'{"text": "a"}\n{"text": "' + b"x" * 500 + b'" "y"}',
            "line 2 cannot be read; got Expecting ',' ",
        ),
        (b"one\ntwo \xff", "is not text; got .*, line 2; needed UTF-8$"),
        (b"one\n\0", "is not text; got NUL characters, line 2"),
        (b" \n", "holds no text"),
        ("text".encode("utf-16"), "line 1; needed UTF-8$"),
    ],
)
def test_errors_name_the_line_and_the_part(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "c.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=rf"c\.jsonl.*{says}"):
        read_text(tmp_path / "c.jsonl")


def test_lines_and_lists_of_documents(tmp_path: Path) -> None:
    """A document may hold what Python takes for the end of a line; empty lines hold none."""
    for name, content, text in (
        ("d.jsonl", '{"text": "one\u2028still\x85one"}\r\n{"text": "two"}', "one\u2028still\x85one\n\ntwo"),
        ("D.JSONL", '\ufeff\n{"text": "one"}\n\n  \r\n{"text": "two"}\n\n', "one\n\ntwo"),
        ("d.json", '[{"text": "one"},\n {"text": "two", "id": 2}]', "one\n\ntwo"),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8", newline="")
        assert read_text(tmp_path / name) == text
    for content, says in (('{"text": "one"}', "got dict"), ('[{"text": "a"}, 5]', "entry 2; got 5"), ("[", "JSON")):
        (tmp_path / "d.json").write_text(content)
        with pytest.raises(InputError, match=says):
            read_text(tmp_path / "d.json")


@pytest.mark.parametrize("name", ["t.csv", "t.CSV", "t.jsonl.gz"])
def test_tables_and_archives_are_not_read_as_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("id,text\n1,hello\n")
    with pytest.raises(InputError, match=r"is no text; got \.(csv|gz); .*\.jsonl"):
        read_documents(tmp_path / name)


def test_the_chat_template_of_a_processor_is_read(tmp_path: Path) -> None:
    add_tokenizer(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": CHAT}))
    text = read_text(tmp_path / "c.jsonl", load_tokenizer(tmp_path))
    assert text == "(user) what is two. (assistant) a number. "
    (tmp_path / "chat_template.jinja").write_text("the tokenizer's own")
    assert read_text(tmp_path / "c.jsonl", load_tokenizer(tmp_path)) == "the tokenizer's own"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"chat_template\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_a_file_without_end_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "holes.txt", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match=r"holes.txt is too large; got 1.1 TB"):
        read_documents(tmp_path / "holes.txt")


def test_a_folder_of_files(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}')
    (tmp_path / "c.md").write_bytes(b"three")
    for name in (".hidden.txt", "picture.png"):
        (tmp_path / name).write_text("not read")
    (tmp_path / "d.txt").mkdir()
    assert read_documents(tmp_path) == ["one", "two", "three"]
    (tmp_path / "e.txt").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"e.txt is not text"):
        read_documents(tmp_path)


def test_a_cloned_data_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its README is about it, and of its splits one is for training."""
    for name, text in (("README.md", "about"), ("data/train-0.txt", "one"), ("data/test-0.txt", "two")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/a.txt").write_text("not read")
    assert read_documents(tmp_path) == ["one"]
    assert "read are data/train-0.txt" in caplog.text
    (tmp_path / "data/train-0.txt").rename(tmp_path / "data/contest.txt")
    assert read_documents(tmp_path) == ["one", "two"]
    for name in ("contest", "test-0"):
        (tmp_path / f"data/{name}.txt").unlink()
    assert read_documents(tmp_path) == ["about"]


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By pyarrow itself where it is installed."""
    path = tmp_path / "t.parquet"
    path.write_bytes(b"no parquet")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(UnsupportedError, match="is parquet, and pyarrow is not installed"):
            read_documents(path)
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    with pytest.raises(InputError, match=r"t.parquet is damaged"):
        read_documents(path)
    both = {"text": [None, "b"], "messages": [CHAT, None]}
    for columns, documents in (({"id": [1, 2], "text": ["a", "b"]}, ["a", "b"]), (both, [CHAT, "b"])):
        parquet.write_table(arrow.table(columns), path)
        assert read_documents(path) == documents
        assert read_documents(tmp_path) == documents
    parquet.write_table(arrow.table({"id": [1]}), path)
    with pytest.raises(InputError, match="has no texts"):
        read_documents(path)


def test_data_sets_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for ``datasets``, which is no dependency."""
    monkeypatch.chdir(tmp_path)
    asked: list[Any] = []
    module: Any = ModuleType("datasets")

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, str]]:
        asked.append((name, config, split, streaming))
        if name == "a/none":
            raise FileNotFoundError("no data set a/none\non the hub")
        return [{"text": "x" * 10}] * 100 if name == "a/long" else [{"text": "one"}, {"messages": CHAT}]

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UnsupportedError, match=r"there is no file a/b, and datasets, which .* pip install datasets"):
        read_documents("a/b")
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert read_documents("a/b") == ["one", CHAT]
    assert read_documents("a/b:en") == ["one", CHAT]
    assert asked == [("a/b", None, "train", True), ("a/b", "en", "train", True)]
    monkeypatch.setattr(texts, "MAX_FETCHED", 45)
    assert len(read_documents("a/long")) == 5
    with pytest.raises(InputError, match="a data set of that name cannot be fetched"):
        read_documents("a/none")
    asked.clear()
    for path in ("./a/b", "a/b.txt", "a/b.jsonl.gz", "b", "a/b/c", Path("a/b")):
        with pytest.raises(InputError, match=r"cannot read .*; correct the path"):
            read_documents(path)
    assert Calibration("./a/b").file == "./a/b"
    (tmp_path / "a").mkdir()
    write_text(tmp_path / "a/b", words=5)
    assert len(read_documents("a/b")) == 1
    assert asked == []


def test_the_default_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = standard_library()
    assert documents == standard_library()
    assert 2 * CHARACTERS <= sum(map(len, documents)) < 2 * (CHARACTERS + LONGEST)
    assert any("def " in one for one in documents)
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    add_tokenizer(tmp_path / "m")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "m")
    windows = calibration_windows(tmp_path / "m", config, Calibration("default"))
    assert windows.shape == (128, min(512, config.max_position_embeddings))
    config.max_position_embeddings = 32
    assert calibration_windows(tmp_path / "m", config, Calibration("default")).shape == (128, 32)
    monkeypatch.chdir(tmp_path)
    prune_checkpoint("m", "q", PruneOptions("6:8", "int8", "wanda", Calibration("default", samples=4, length=128)))
    assert "wanda, 4 windows of 128 tokens of Python's standard library" in Path("q/README.md").read_text()
    write_text(tmp_path / "default")  # a file of that name comes first
    own = calibration_windows(tmp_path / "m", config, Calibration("default", samples=4))
    assert not torch.equal(own, windows[:4, :32])
    assert own.shape == (4, 32)
