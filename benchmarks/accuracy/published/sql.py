"""Questions to SQL over small tables, checked by what the query returns: both queries run on SQLite in memory.

Names, columns, values and comparisons are drawn, so that the schema must be read. Seeds below :data:`JUDGED` are for
training, that one and those above for judging: tables of judged questions have names that training never draws.
"""

from __future__ import annotations

import random
import sqlite3
from dataclasses import dataclass

JUDGED = 1_000_000
"""The first seed that nobody may train on."""

TABLES = ["orders", "tickets", "shipments", "invoices", "visits", "trips", "courses", "repairs", "loans", "rentals"]
JUDGED_TABLES = ["flights", "parcels"]
TEXTS = {
    "city": ["Lisbon", "Osaka", "Leeds", "Hanoi", "Lima"],
    "status": ["open", "closed", "late", "paid"],
    "owner": ["Amira", "Ben", "Chidi", "Dana", "Elif"],
    "kind": ["small", "large", "fragile", "urgent"],
    "colour": ["red", "blue", "green", "black"],
}
"""Column of text -> its values."""

NUMBERS = {
    **{"price": (1, 90), "weight": (1, 40), "year": (2010, 2024)},
    **{"quantity": (1, 12), "distance": (5, 900), "days": (1, 60)},
}
"""Column of whole numbers -> the least and the most."""

GENERATORS = {
    "count": ("How many {table} have the {a} {v}?", "COUNT(*) FROM {table} WHERE {a} = '{v}'"),
    "sum": ("What is the total {x} of all {table} whose {a} is {v}?", "SUM({x}) FROM {table} WHERE {a} = '{v}'"),
    "above": ("List the id of each of the {table} with a {x} of {more} {k}.", "id FROM {table} WHERE {x} {sign} {k}"),
    "groups": (
        "For each {a}, give the {a} and the number of {table}.",
        "{a}, COUNT(*) FROM {table} GROUP BY {a}",
    ),
    "largest of groups": (
        "For each {a}, give the {a} and the largest {x}.",
        "{a}, MAX({x}) FROM {table} GROUP BY {a}",
    ),
    "top": (
        "Give the {a} and {x} of the {top} {table} with the largest {x}, the largest first; of equal ones the lower id "
        "first.",
        "{a}, {x} FROM {table} ORDER BY {x} DESC, id LIMIT {top}",
    ),
    "distinct": (
        "Which different values of {a} occur among {table} whose {b} is not {w}?",
        "DISTINCT {a} FROM {table} WHERE {b} <> '{w}'",
    ),
    "average": (
        "What is the average {y} of {table} with {a} {v} and {b} {w}?",
        "AVG({y}) FROM {table} WHERE {a} = '{v}' AND {b} = '{w}'",
    ),
    "having": (
        "Which {a} has at least {top} {table}? Give the {a} alone.",
        "{a} FROM {table} GROUP BY {a} HAVING COUNT(*) >= {top}",
    ),
    "above average": (
        "List the id of the {table} whose {x} is above the average {x}.",
        "id FROM {table} WHERE {x} > (SELECT AVG({x}) FROM {table})",
    ),
    "either": (
        "How many {table} have the {a} {v} or a {x} of {more} {k}?",
        "COUNT(*) FROM {table} WHERE {a} = '{v}' OR {x} {sign} {k}",
    ),
    "products": (
        "Give the sum of {x} times {y} over all {table} by {a}, with the {a} first.",
        "{a}, SUM({x} * {y}) FROM {table} GROUP BY {a}",
    ),
}
"""Name -> question and query, with places for table, columns of text and of numbers, and values."""

REQUEST = "{schema}\n\n{question}\n\nAnswer with one SQLite query, ended by a semicolon."
BEGUN = "SELECT"
STOP = ";"
TOKENS = 64
"""Most tokens of an answer."""

FILLINGS, ROWS, STEPS = 3, 24, 20_000
"""Fillings of a table, rows of each, and virtual-machine instructions that a query may take."""


@dataclass(frozen=True)
class Question:
    """A question, and the table and the query that know its answer."""

    generator: str
    request: str
    answer: str
    schema: str
    columns: tuple[str, ...]

    def is_right(self, answer: str) -> bool:
        """Say whether what follows ``SELECT`` returns the rows of the gold query on every filling of the table."""
        try:
            return all(self._rows(BEGUN + answer, seed) == self._rows(self.answer, seed) for seed in range(FILLINGS))
        except (sqlite3.Error, sqlite3.Warning, ValueError):
            return False

    def _rows(self, query: str, seed: int) -> list[tuple[object, ...]]:
        """Return the rows of a query, in their order where the question asks for one."""
        draw, database = random.Random(seed), sqlite3.connect(":memory:")
        database.execute(self.schema)
        for key in range(1, ROWS + 1):
            row = [draw.choice(TEXTS[one]) if one in TEXTS else draw.randint(*NUMBERS[one]) for one in self.columns]
            places = ", ".join("?" * (1 + len(row)))
            database.execute(f"INSERT INTO {self.schema.split()[2]} VALUES ({places})", [key, *row])
        database.execute("PRAGMA query_only = 1")
        database.set_progress_handler(lambda: 1, STEPS)
        found = database.execute(query.split(STOP)[0]).fetchmany(10 * ROWS)
        rounded = [tuple(round(one, 6) if isinstance(one, float) else one for one in row) for row in found]
        return rounded if "ORDER BY" in self.answer else sorted(rounded, key=repr)


def questions(each: int, seed: int = JUDGED) -> list[Question]:
    """Return ``each`` questions of every generator, none twice."""
    draw, found = random.Random(seed), list[Question]()
    for generator in GENERATORS:
        distinct: dict[str, Question] = {}
        while len(distinct) < each:
            one = _question(generator, draw, JUDGED_TABLES if seed >= JUDGED else TABLES)
            distinct.setdefault(one.request, one)
        found += distinct.values()
    return found


def training(number: int, seed: int = 0) -> list[Question]:
    """Return about as many questions to train on, none of them judged."""
    return questions(-(-number // len(GENERATORS)), seed)


def _question(generator: str, draw: random.Random, tables: list[str]) -> Question:
    (a, b), (x, y) = draw.sample(sorted(TEXTS), 2), draw.sample(sorted(NUMBERS), 2)
    sign, more = draw.choice([(">", "more than"), ("<", "less than")])
    names = {"table": draw.choice(tables), "a": a, "b": b, "x": x, "y": y, "sign": sign, "more": more}
    values = {"v": draw.choice(TEXTS[a]), "w": draw.choice(TEXTS[b]), "k": draw.randint(*NUMBERS[x])}
    places = names | values | {"top": draw.randint(2, 4)}
    question, query = (part.format(**places) for part in GENERATORS[generator])
    columns = draw.sample([a, b, x, y], 4)
    typed = ", ".join(f"{one} {'TEXT' if one in TEXTS else 'INTEGER'}" for one in ("id", *columns))
    schema = f"CREATE TABLE {names['table']} ({typed});"
    request = REQUEST.format(schema=schema, question=question)
    return Question(generator, request, f"{BEGUN} {query}{STOP}", schema, tuple(columns))
