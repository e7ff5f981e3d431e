"""Train a pruned model in a plain loop, its zeros held: python examples/own_loop.py [MODEL] [--text FILE]."""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import slidesparse as ss

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a folder, or a hub's name")
parser.add_argument("--out", default="trained", help="folder for the pruned and the trained checkpoint")
parser.add_argument("--text", default=Path(__file__).parents[1] / "docs/pruning.md", type=Path, help="a text file")
arguments = parser.parse_args()
pruned, trained = (f"{arguments.out}/{name}" for name in ("pruned", "trained"))
Path(arguments.out).mkdir(exist_ok=True)

ss.prune(arguments.model, pruned, "6:8", dtype="bf16")
tokenizer = AutoTokenizer.from_pretrained(pruned)
model = AutoModelForCausalLM.from_pretrained(pruned, dtype=torch.float32)
windows = tokenizer(arguments.text.read_text(), return_tensors="pt").input_ids[0].unfold(0, 128, 128)

held = ss.HeldZeros(model)  # remembers where the zeros are
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
for step, batch in enumerate(windows.split(4)):
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    held.apply_()  # and sets them back, since the optimiser moved them
    print(f"step {step}: loss {loss.item():.3f}")

# Its config still says which pattern it follows: round it by ss.prune(trained, ..., "6:8").
model.to(torch.bfloat16).save_pretrained(trained)
tokenizer.save_pretrained(trained)
