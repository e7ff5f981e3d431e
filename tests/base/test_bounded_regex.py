"""Regular expressions of strangers: those that take no time are taken, the others refused, and the bound holds."""

from __future__ import annotations

import re
import time

import pytest

from slidesparse.base.bounded_regex import require_bounded
from slidesparse.errors import InputError
from slidesparse.models.targets import matches_entry

NAME = "model.layers.12.mlp.experts.127.down_proj"


@pytest.mark.parametrize(
    "entry",
    [
        r".*lm_head",
        r"(.*[.])?lm_head$",
        r"^(?!.*(mlp|experts)).*$",
        r"(.*\.)?layers\.(0|1|12)\.(.*\.)?experts\.\d+\..*_proj$",
        r"model\.layers\.[0-9]+\.mlp\.experts\.[0-9]+\.(gate|up|down)_proj.*",
        r"(?i)MODEL.*\.\d{1,3}\..*(q|k|down)_proj$",
        r"(?:[a-z]*\.){2}12.*(?<!q)_proj",
        "|".join(f"model.layers.{number}.mlp" for number in range(200)),
    ],
)
def test_what_people_write_is_taken(entry: str) -> None:
    assert matches_entry(NAME, f"re:{entry}") is (re.match(entry, NAME) is not None)


EVIL = [
    *(r"(a+)+$", r"(a|aa)+$", r"(a|a)*$", r"(.*)*x", r".*" * 9 + "x", r"(x+x+)+y", r"([a-zA-Z.]+)*$", r"(.*a){20}"),
    *(r"(?x)(a+) + $", r"(a+)(?#c)*$", r"(?=(a+)+$)a", "a?" * 40 + "a" * 40, "(a|b|ab)" * 40 + "!", r"((ab)*c*)*d"),
    *("((((a|bb){64}){64}){64}){64}", "(?:a{1,60}){1,60}!", "(a?){64}b", "(?:a|b*)*c", "(?:a{2}|b){1000000}(a+)+$"),
]
MALFORMED = ["(", "a{" + "9" * 500 + "}", "a{" + "9" * 5000 + "}", "(" * 4000 + ")" * 4000]
COSTLY = ["(?i)[\0-\U0010ffff]", r"(?i)[\0-\U0010ffff]", "a" * 10_000]


@pytest.mark.parametrize("entry", [*EVIL, *MALFORMED, *COSTLY], ids=lambda entry: entry[:30])
def test_what_never_ends_is_refused_at_once(entry: str) -> None:
    began = time.monotonic()
    with pytest.raises(InputError, match="regular expression") as refusal:
        matches_entry("a" * 64 + "!", f"re:{entry}")
    assert time.monotonic() - began < 2
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize("part", [".*", "a?", "(a|aa)", "a{0,3}", "(?:a|b|ab)", "(?=.*)a*", "(a*?)"])
def test_the_longest_that_is_taken_ends(part: str) -> None:
    """As many of a part as are bounded, on a name that they match in all ways, and that does not match."""
    longest = 0
    for count in range(1, 40):
        try:
            require_bounded(part * count + "!", 30)
        except InputError:
            break
        longest = count
    began = time.monotonic()
    assert re.match(part * longest + "!", "a" * 30) is None
    assert longest
    assert time.monotonic() - began < 30
