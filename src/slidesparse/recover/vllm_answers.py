"""The process that asks vLLM for answers: ``python -m slidesparse.recover.vllm_answers JOB.json ANSWERS.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(job: Path, answers: Path) -> None:
    """Answer the prompts of a job, and write the texts of the answers."""
    from vllm import LLM, SamplingParams

    asked = json.loads(job.read_text())
    length = max(map(len, asked["prompts"])) + asked["longest"]
    model = LLM(
        model=asked["model"], dtype="bfloat16", max_model_len=length, max_num_seqs=1024, seed=asked["seed"],
        disable_log_stats=True,
    )  # fmt: skip
    drawn = SamplingParams(max_tokens=asked["longest"], **asked["sampling"])
    found = model.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], drawn, use_tqdm=False)
    answers.write_text(json.dumps([one.outputs[0].text for one in found]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
