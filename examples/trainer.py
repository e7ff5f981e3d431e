"""Train a pruned model by transformers' Trainer, its zeros held: python examples/trainer.py [MODEL] [--text FILE]."""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

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
model = AutoModelForCausalLM.from_pretrained(pruned, dtype="float32")
windows = tokenizer(arguments.text.read_text(), return_tensors="pt").input_ids[0].unfold(0, 128, 128)

trainer = Trainer(
    model=model,
    args=TrainingArguments(trained, num_train_epochs=1, per_device_train_batch_size=4, report_to="none"),
    train_dataset=[{"input_ids": window, "labels": window} for window in windows],
    callbacks=[ss.HeldZeros(model).callback()],  # the one line; TRL's trainers take it, too
)
trainer.train()

# Its config still says which pattern it follows: round it by ss.prune(trained, ..., "6:8").
trainer.save_model()
tokenizer.save_pretrained(trained)
