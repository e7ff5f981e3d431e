"""Chat templates of strangers: programs that take time or memory without end, or make text without end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from checkpoints import add_tokenizer

from slidesparse.base.log import log_once
from slidesparse.errors import CheckpointError
from slidesparse.offline.calibrate import chats
from slidesparse.offline.calibrate.calibration import load_tokenizer
from slidesparse.offline.calibrate.chats import templated

CHAT = [{"role": "user", "content": "what is two"}]


def tokenizer(folder: Path, template: str) -> object:
    add_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder)


def test_one_text_for_each_chat(tmp_path: Path) -> None:
    made = tokenizer(
        tmp_path, "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}\u2028\n{% endfor %}"
    )
    assert templated([CHAT, CHAT * 2], made) == ["<s>user: what is two\u2028\n", "<s>user: what is two\u2028\n" * 2]
    assert templated([], None) == []


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", r"more than 0.51 s"),
        ("{{ 10**(10**9) }}", r"more than 0.51 s"),
        ("{{ 'a' * 10**11 }}", "MemoryError"),
        ("{{ 'a' * 10**7 }}", "10000000 characters; needed at most 1048752"),
        ("{{ raise_exception('no\nway') }}", "TemplateError: no"),
        ("{{ ", "TemplateSyntaxError"),
        ("{% include '/etc/passwd' %}", "TypeError"),
    ],
)
def test_templates_without_end_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, says: str
) -> None:
    monkeypatch.setattr(chats, "SECONDS", 0.5)
    made = tokenizer(tmp_path, template)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=f"the tokenizer's chat template fails; got {says}") as refusal:
        templated([CHAT], made)
    assert "\n" not in str(refusal.value)
    assert time.monotonic() - began < 10


def test_a_template_that_fails_late_ends_the_child(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, "{% if messages|length > 1 %}{{ raise_exception('two') }}{% endif %}x")
    with pytest.raises(CheckpointError, match="got TemplateError: two"):
        templated([CHAT, CHAT * 2, *[CHAT] * 20000], made)


@pytest.mark.parametrize("to_answer", [False, True])
def test_the_date_and_chance_are_no_inputs(tmp_path: Path, to_answer: bool, caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    template = "{{ strftime_now('%d %b %Y, %H:%M') }} {{ range(10**5)|random }}{{ 'Go' if add_generation_prompt }}"
    made = tokenizer(tmp_path, template)
    (one, two), (again, _) = (templated([CHAT, CHAT], made, to_answer=to_answer) for _ in range(2))
    assert one == again != two
    assert one.startswith("26 Jul 2024, 00:00 ")
    assert one.endswith("Go") is to_answer
    assert "held at 2024-07-26" in caplog.text


def test_no_other_module_runs_a_template() -> None:
    package = Path(chats.__file__).parents[2]
    assert [one.name for one in package.rglob("*.py") if "apply_chat_template" in one.read_text()] == ["chats.py"]
