"""Trains a swapped Hugging Face model with transformers' Trainer.

    python examples/huggingface_trainer.py --model gpt2 --steps 100

Without --model it makes a GPT-2 of two layers with random weights. The task is to count: each sequence starts at a
random number and goes up by one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch
from torch.utils.data import Dataset

import warpwright

try:
    import accelerate  # noqa: F401  Trainer imports it late
    from transformers import (
        AutoModelForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainingArguments,
    )
except ModuleNotFoundError as error:
    sys.exit(f"{error}: pip install transformers accelerate")

NUMBERS, LENGTH = 100, 32


class Counting(Dataset):
    def __len__(self) -> int:
        return NUMBERS

    def __getitem__(self, start: int) -> dict[str, torch.Tensor]:
        tokens = (start + torch.arange(LENGTH)) % NUMBERS
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a causal language model's name or folder")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    torch.manual_seed(0)
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model)
    else:
        config = GPT2Config(
            vocab_size=NUMBERS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
    print(warpwright.swap(model))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            logging_steps=20,
            report_to=[],
            save_strategy="no",
        )
        Trainer(model=model, args=arguments, train_dataset=Counting()).train()

    model.eval()
    with torch.no_grad():
        start = torch.arange(20, 28, device=model.device)
        following = model(start[None]).logits[0, -1].argmax().item()
    print(f"after 20 … 27 the model says {following}")


if __name__ == "__main__":
    main()
