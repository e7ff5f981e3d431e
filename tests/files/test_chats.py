"""Chat templates: one text for each chat, and one line of error."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import add_tokenizer

from slidesparse.errors import CheckpointError
from slidesparse.offline.calibrate.calibration import load_tokenizer
from slidesparse.offline.calibrate.texts import templated

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
        ("{% if messages|length > 1 %}{{ raise_exception('two') }}{% endif %}x", "TemplateError: two"),
    ],
)
def test_templates_that_fail_are_one_line(tmp_path: Path, template: str, says: str) -> None:
    made = tokenizer(tmp_path, template)
    with pytest.raises(CheckpointError, match=f"the tokenizer's chat template fails; got {says}") as refusal:
        templated([CHAT, CHAT * 2], made)
    assert "\n" not in str(refusal.value)
