"""The process that asks vLLM for answers: ``python -m slidesparse.recovery.vllm_answers JOB.json``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from slidesparse.base.whole_file import replace_file

AT_ONCE = 8192
"""Prompts of a batch, whose answers are kept together: some minutes of a GPU. vLLM runs 1024 at a time; fewer would
often wait for the last of a batch."""


def main(job: Path) -> None:
    """Answer the prompts of a job from ``done`` on, and keep the texts of the answers, a file for each batch."""
    from vllm import LLM, SamplingParams

    asked, parent = json.loads(job.read_text()), os.getppid()
    prompts, done = asked["prompts"], asked["done"]
    length = max(map(len, prompts)) + asked["longest"]
    model = LLM(
        model=asked["model"], dtype="bfloat16", max_model_len=length, max_num_seqs=1024, seed=asked["seed"] + done,
        disable_log_stats=True,
    )  # fmt: skip
    drawn = SamplingParams(max_tokens=asked["longest"], **asked["sampling"])
    for start in range(done, len(prompts), AT_ONCE):
        batch = [{"prompt_token_ids": ids} for ids in prompts[start : start + AT_ONCE]]
        found = model.generate(batch, drawn, use_tqdm=False)
        if os.getppid() != parent:
            sys.exit("the command that asked was killed, and another may have its place")
        replace_file(Path(f"{asked['kept']}-{start}.json"), json.dumps([one.outputs[0].text for one in found]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
