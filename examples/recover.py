"""Train a pruned model on, with its zeros held, in a plain PyTorch loop.

    slidesparse prune BASE PRUNED --pattern 6:8 --dtype bf16 --method sparsegpt --calibration text.txt
    python examples/recover.py PRUNED text.txt RECOVERED --dense BASE --steps 500
    slidesparse prune RECOVERED SERVED --pattern 6:8 --dtype int8        # keeps the zeros, quantises

With ``--dense`` it is trained toward the predictions of the dense model, which know more than the text's next token.
Take a low rate, a twentieth of that with which the model was trained.

With transformers' Trainer it is one argument: ``callbacks=[HeldZeros(model).callback()]``. Before it saves, delete
``model.config.slidesparse_config``, as is done below.
"""

import argparse
import math
from pathlib import Path

import torch
from torch.nn.functional import kl_div, log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

from slidesparse import HeldZeros
from slidesparse.offline.calibrate.calibration import encode
from slidesparse.offline.calibrate.texts import read_text

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("pruned", type=Path)
parser.add_argument("text", type=Path)
parser.add_argument("recovered", type=Path)
parser.add_argument("--dense", type=Path)
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--rate", type=float, default=2e-5)
options = parser.parse_args()
if options.recovered.exists():
    parser.error(f"{options.recovered} exists")

device = "cuda" if torch.cuda.is_available() else "cpu"
local = {"local_files_only": True, "trust_remote_code": False}
tokenizer = AutoTokenizer.from_pretrained(options.pruned, **local)
# Float32 weights take the optimiser's small steps; autocast multiplies them in BF16.
model = AutoModelForCausalLM.from_pretrained(options.pruned, **local, dtype=torch.float32).to(device)
dense = None
if options.dense is not None:
    dense = AutoModelForCausalLM.from_pretrained(options.dense, **local).to(device).eval()
tokens = encode(tokenizer, read_text(options.text, tokenizer)).to(device)
if len(tokens) <= options.length:
    parser.error(f"{options.text} has {len(tokens)} tokens, fewer than --length")
zeros = HeldZeros(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.1)
window = torch.arange(options.length, device=device)
torch.manual_seed(0)
model.train()
for step in range(options.steps):
    for group in optimizer.param_groups:  # a cosine, from the rate down to a tenth of it
        group["lr"] = options.rate * (0.55 + 0.45 * math.cos(math.pi * step / options.steps))
    starts = torch.randint(len(tokens) - options.length, (options.batch, 1), device=device)
    ids = tokens[starts + window]
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        found = model(input_ids=ids, labels=ids)
    loss = found.loss
    if dense is not None:
        with torch.no_grad():
            wanted = log_softmax(dense(input_ids=ids).logits.float(), -1)
        predicted = log_softmax(found.logits.float(), -1)
        loss = kl_div(predicted.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True)
    loss.backward()
    # a NaN or Inf stops here, before it reaches the weights
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()
    zeros.apply_()
    if step % 50 == 0 or step == options.steps - 1:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)

del model.config.slidesparse_config  # what is written now is a source for ``slidesparse prune``, not its output
model.to(torch.bfloat16).save_pretrained(options.recovered)
tokenizer.save_pretrained(options.recovered)
