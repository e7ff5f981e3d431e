"""Questions with short exact answers, of generators of the package ``reasoning-gym``.

Seeds below :data:`JUDGED` are for training, that one and those above for judging: no question of one set is in the
other but by chance, and :func:`questions` leaves out those that are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import reasoning_gym

JUDGED = 1_000_000
"""The first seed that nobody may train on."""

GENERATORS: dict[str, dict[str, Any]] = {
    "basic_arithmetic": {"max_terms": 3, "max_digits": 2},
    "chain_sum": {"max_terms": 4, "max_digits": 3},
    "gcd": {"max_value": 40},
    "lcm": {"max_value": 20},
    "leg_counting": {"min_animals": 1, "max_animals": 2, "max_instances": 4},
    "count_bits": {"max_n": 2000},
    "fraction_simplification": {"max_value": 20, "max_factor": 5},
    "simple_equations": {"min_terms": 2, "max_terms": 2, "max_value": 30},
    "number_sorting": {"max_numbers": 6, "max_decimals": 0},
    "products": {"max_digits": 2},
    "spell_backward": {"max_word_len": 6},
    "letter_counting": {"max_words": 6},
}
"""Name -> settings, chosen so that a model of half a billion parameters answers some and not all."""

REQUEST = "{}\n\nGive the answer only, on one line."
BEGUN = "The answer is:"
STOP = "\n"
TOKENS = 32
"""Most tokens of an answer."""

MOST_JUDGED = 300
"""Most questions of a generator that anybody is judged by."""


@dataclass(frozen=True)
class Question:
    """A question, and what knows its answer."""

    generator: str
    number: int
    entry: dict[str, Any]
    dataset: Any

    @property
    def request(self) -> str:
        """What the user says."""
        return REQUEST.format(self.entry["question"])

    @property
    def answer(self) -> str:
        """What the assistant should say."""
        return f"{BEGUN} {self.entry['answer']}"

    def is_right(self, answer: str) -> bool:
        """Say whether the first line of an answer is exact."""
        given = answer.strip().split("\n")[0].strip().strip("`*").removesuffix(".").strip()
        return self.dataset.score_answer(given, self.entry) == 1.0


def questions(each: int, seed: int = JUDGED) -> list[Question]:
    """Return ``each`` questions of every generator, no text twice."""
    if seed >= JUDGED and each > MOST_JUDGED:
        raise SystemExit(f"{each} questions of a generator: of more than {MOST_JUDGED} some were trained on")
    found = []
    for name, settings in GENERATORS.items():
        dataset = reasoning_gym.create_dataset(name, seed=seed, size=3 * each, **settings)
        distinct = {entry["question"]: entry for entry in dataset}
        found += [Question(name, n, entry, dataset) for n, entry in enumerate(list(distinct.values())[:each])]
    return found


def training(number: int, seed: int = 0) -> list[Question]:
    """Return at most as many questions to train on, none of them judged, not even with its numbers exchanged."""
    judged = {words(one) for one in questions(MOST_JUDGED)}
    return [one for one in questions(-(-number // len(GENERATORS)), seed) if words(one) not in judged]


def words(question: Question) -> tuple[str, ...]:
    """Return a question's words in order of the alphabet: it is the same with its numbers exchanged."""
    return tuple(sorted(re.findall(r"\w+", question.entry["question"])))
