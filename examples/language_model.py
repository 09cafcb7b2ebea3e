"""Trains a small GPT on the characters of a text file and writes some text with it.

    python examples/language_model.py --text input.txt --steps 2000

Without --text it reads this repository's own documentation. The model is written with torch.nn and swapped. The loss
comes from linear_cross_entropy: the logits of all positions, the largest tensor of such a step, never exist at once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import warpwright
import warpwright.functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, characters: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(characters, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.norm(self.blocks(self.tokens(tokens) + self.positions(positions)))

    def loss(self, tokens: Tensor) -> Tensor:
        """Of predicting each character from those before it."""
        return F.linear_cross_entropy(self.hidden(tokens[:, :-1]), self.head.weight, tokens[:, 1:])

    @torch.no_grad()
    def write(self, tokens: Tensor, count: int) -> Tensor:
        for _ in range(count):
            logits = self.head(self.hidden(tokens[:, -self.context :])[:, -1])
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return tokens


def read(path: Path | None) -> str:
    if path is not None:
        return path.read_text(encoding="utf-8")
    docs = Path(__file__).resolve().parents[1] / "docs"
    return "".join(page.read_text(encoding="utf-8") for page in sorted(docs.glob("*.md")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="a text file")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    torch.manual_seed(0)
    text = read(options.text)
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters)}
    data = torch.tensor([number[character] for character in text], device=options.device)

    context, batch = 64, 12
    if len(data) <= context + 1:
        parser.error(f"--text: expected more than {context + 1} characters, got {len(data)}")
    model = GPT(len(characters), context, width=96, layers=3, heads=3).to(options.device)
    print(warpwright.swap(model, fuse=True))
    optimizer = warpwright.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(data) - context - 1, (batch,)).tolist()
        loss = model.loss(torch.stack([data[start : start + context + 1] for start in starts]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == 1:
            print(f"step {step}: loss {loss.item():.3f}")
    written = model.write(data[:1][None], 200)[0]
    print("".join(characters[i] for i in written.tolist()))


if __name__ == "__main__":
    main()
