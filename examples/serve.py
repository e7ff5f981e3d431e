"""Ask a pruned model by vLLM, offline: python examples/serve.py [PRUNED] [--question TEXT ...]. It needs a GPU.

Without a GPU, ss.load runs the model in transformers. For a server: vllm serve PRUNED.
"""

import argparse

from vllm import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", default="6of8", help="what examples/prune.py wrote, or any pruned chat model")
parser.add_argument("--question", nargs="+", default=["What is a sparse matrix?", "Name three primes."])


def main() -> None:
    """Ask all questions at once."""
    arguments = parser.parse_args()
    # The checkpoint says what it is, and vLLM finds the plugin by itself. Its log has a line that starts with
    # "slidesparse", on what runs sparse.
    llm = LLM(model=arguments.model, max_model_len=1024)
    chats = [[{"role": "user", "content": question}] for question in arguments.question]
    for question, answer in zip(
        arguments.question, llm.chat(chats, SamplingParams(temperature=0, max_tokens=100)), strict=True
    ):
        print(f"{question}\n  {answer.outputs[0].text}")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
