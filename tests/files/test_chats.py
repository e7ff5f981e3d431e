"""Chat templates of strangers run in transformers' sandbox, and see one date."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import add_tokenizer

from slidesparse.base.log import log_once
from slidesparse.errors import CheckpointError
from slidesparse.offline.calibrate import chats
from slidesparse.offline.calibrate.calibration import load_tokenizer
from slidesparse.offline.calibrate.chats import DATE, templated

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
        ("{{ raise_exception('no\nway') }}", "TemplateError: no"),
        ("{{ ", "TemplateSyntaxError"),
        ("{% include '/etc/passwd' %}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ],
)
def test_what_a_template_raises_is_one_line(tmp_path: Path, template: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=f"the tokenizer's chat template fails; got {says}"):
        templated([CHAT], tokenizer(tmp_path, template))


FORMATS = ("%d %b %Y", "%Y-%m-%d", "%d %B %Y", "%A, %d %B %Y, %H:%M", "%c | %x | %X | %j | %F %T", "%-d.%-m.")


@pytest.mark.parametrize("before", ["", "\n", "  \n", "  {% if true %}\n  x{% endif %}"])
@pytest.mark.parametrize("to_answer", [False, True])
def test_the_date_is_no_input(tmp_path: Path, to_answer: bool, before: str, caplog: pytest.LogCaptureFixture) -> None:
    """The text is that of transformers with a clock that stands still: spaces at the beginning too."""
    log_once.cache_clear()
    after = "|{{ 'Go' if add_generation_prompt }}"
    plain = tokenizer(tmp_path, before + "|".join(DATE.strftime(one) for one in FORMATS) + after)
    (expected,) = templated([CHAT], plain, to_answer=to_answer)
    made = tokenizer(tmp_path, before + "|".join(f"{{{{ strftime_now('{one}') }}}}" for one in FORMATS) + after)
    assert templated([CHAT, CHAT], made, to_answer=to_answer) == [expected] * 2
    assert expected.endswith("Go") is to_answer
    assert "held at 2024-07-26" in caplog.text


def test_no_other_module_runs_a_template() -> None:
    package = Path(chats.__file__).parents[2]
    assert [one.name for one in package.rglob("*.py") if "apply_chat_template" in one.read_text()] == ["chats.py"]
