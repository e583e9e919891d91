"""Writes the tables of docs/scaling.md: what EAGLE-3 heads cost for targets of three sizes.

python scripts/benchmarks/recipes.py            # rewrite the part of docs/scaling.md between the two markers
python scripts/benchmarks/recipes.py --check    # only say whether it is up to date (exit status 1 if not)

What is assumed stands in this file, by name; what follows from it is computed (`recipe_costs.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks.recipe_costs import (
    BYTES_OF_TEXT,
    BYTES_SAVED,
    BYTES_TRAINED,
    LOSS_BYTES,
    DraftCost,
    TargetCost,
    TargetShape,
    draft_cost,
    target_cost,
)
from scripts.benchmarks.report import write_text

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
BEGIN, END = "<!-- tables: begin (scripts/benchmarks/recipes.py) -->", "<!-- tables: end -->"

# An H100 SXM by its data sheet: dense bfloat16 operations per second, bytes of memory, bytes per second.
PEAK, MEMORY, BANDWIDTH = 989e12, 80e9, 3.35e12
UTILISATION = 0.30  # of the peak, in training (docs/scaling.md says where this comes from)
DECODING_SHARE = 0.5  # of the bandwidth that an engine's batched decoding attains, scheduling and prompts included
LENGTH = 2048  # tokens of a row
TOKENS_PER_CONVERSATION = 1100
REPLY_SHARE = 0.75  # of a conversation's tokens: what the target writes, and what is trained on
NUM_EPOCHS = 2
NUM_CHECKPOINTS = 2  # save_total_limit
GB, TB = 1e9, 1e12


@dataclass(frozen=True)
class Recipe:
    """conversations: how many; shards: over how many GPUs the frozen target is cut up while training, and while it
    writes the data; batch_tokens: of a micro-batch on each GPU."""

    shape: TargetShape
    conversations: int
    num_gpus: int
    training_shards: int = 1
    decoding_shards: int = 1
    batch_tokens: int = 8192

    @property
    def tokens(self) -> int:
        """Of one epoch."""
        return self.conversations * TOKENS_PER_CONVERSATION

    @property
    def target(self) -> TargetCost:
        return target_cost(self.shape, LENGTH)

    @property
    def draft(self) -> DraftCost:
        return draft_cost(self.shape, LENGTH)

    # Training.

    @property
    def operations_per_token(self) -> float:
        """Target, unroll; and both LM heads where there is a loss."""
        heads = REPLY_SHARE * (self.target.lm_head + self.draft.lm_head)
        return self.target.forward + self.draft.unroll + heads

    @property
    def tokens_per_second(self) -> float:
        return self.num_gpus * UTILISATION * PEAK / self.operations_per_token

    @property
    def hours(self) -> float:
        return NUM_EPOCHS * self.tokens / self.tokens_per_second / 3600

    @property
    def target_weights(self) -> float:
        """Bytes of the frozen target in training on one GPU: layers are split, embedding and LM head stay whole."""
        if self.training_shards == 1:
            return 2 * self.target.parameters
        whole = 2 * self.target.lm_head  # two matrices in bfloat16; an LM head's operations are two for each entry
        return whole + (2 * self.target.parameters - whole) / self.training_shards

    @property
    def training_memory(self) -> float:
        """Of one GPU: the target's share and two gathered layers, trained weights, what autograd keeps, features, and
        the loss."""
        weights = self.target_weights
        if self.training_shards > 1:
            weights += 2 * 2 * self.target.parameters / self.shape.num_layers  # one layer runs, the next one arrives
        features = 4 * 2 * self.shape.hidden_size * self.batch_tokens
        kept = self.draft.kept + self.draft.kept_per_token * self.batch_tokens
        return weights + BYTES_TRAINED * self.draft.parameters + kept + features + LOSS_BYTES

    # Data.

    @property
    def decoding_rate(self) -> float:
        """Tokens per second of all GPUs writing replies: the batch whose keys and values fill the memory, each step
        reading weights and keys and values once."""
        weights = 2 * self.target.parameters
        room = 0.9 * MEMORY * self.decoding_shards - weights
        context = TOKENS_PER_CONVERSATION / 2  # on average
        batch = min(512.0, room / (self.shape.kv_bytes * 2 * context))
        seconds = (weights + batch * context * self.shape.kv_bytes) / (BANDWIDTH * self.decoding_shards)
        return self.num_gpus / self.decoding_shards * DECODING_SHARE * batch / seconds

    @property
    def writing_hours(self) -> float:
        return REPLY_SHARE * self.tokens / self.decoding_rate / 3600

    # Disk.

    @property
    def offline_bytes(self) -> float:
        """Three tapped layers and the last state in bfloat16, an int32 id and a mask byte per token."""
        return self.tokens * (4 * 2 * self.shape.hidden_size + 5)

    @property
    def online_bytes(self) -> float:
        checkpoints = NUM_CHECKPOINTS * BYTES_SAVED + 4
        return BYTES_OF_TEXT * self.tokens + checkpoints * self.draft.parameters


LLAMA_1B = TargetShape("Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, 128_256, is_tied=True)
LLAMA_8B = TargetShape("Llama-3.1-8B", 32, 4096, 14_336, 32, 8, 128, 128_256, is_tied=False)
LLAMA_70B = TargetShape("Llama-3.3-70B", 80, 8192, 28_672, 64, 8, 128, 128_256, is_tied=False)
ULTRACHAT, EAGLE_3 = 207_865, 68_000 + 464_000
RECIPES = (
    Recipe(LLAMA_1B, ULTRACHAT, num_gpus=1),
    Recipe(LLAMA_8B, EAGLE_3, num_gpus=8),
    Recipe(LLAMA_70B, EAGLE_3, num_gpus=8, training_shards=8, decoding_shards=4, batch_tokens=4096),
)
ROWS: dict[str, Callable[[Recipe], str]] = {
    "conversations": lambda r: f"{r.conversations:,}",
    "tokens of an epoch": lambda r: f"{r.tokens / 1e6:,.0f} M",
    "H100 GPUs": lambda r: str(r.num_gpus),
    "tokens of a GPU's micro-batch": lambda r: f"{r.batch_tokens:,}",
    "parameters of the heads": lambda r: f"{r.draft.parameters / 1e6:,.0f} M",
    "operations per token: target": lambda r: f"{r.target.forward / GB:.1f} G",
    "operations per token: heads": lambda r: f"{(r.operations_per_token - r.target.forward) / GB:.1f} G",
    "training, tokens/s of all GPUs": lambda r: f"{r.tokens_per_second / 1e3:,.0f} k",
    f"**training, hours ({NUM_EPOCHS} epochs)**": lambda r: f"**{r.hours:.1f}**",
    "**memory of a GPU in training**": lambda r: f"**{r.training_memory / GB:.0f} GB**",
    "of it: the frozen target": lambda r: f"{r.target_weights / GB:.1f} GB",
    "of it: kept for the backward pass": lambda r: f"{r.draft.kept_per_token * r.batch_tokens / GB:.1f} GB",
    "writing replies, tokens/s of all GPUs": lambda r: f"{r.decoding_rate / 1e3:,.0f} k",
    "**writing replies, hours**": lambda r: f"**{r.writing_hours:.1f}**",
    "**disk, online**": lambda r: f"**{r.online_bytes / GB:.0f} GB**",
    "disk, offline features": lambda r: f"{r.offline_bytes / TB:.1f} TB",
}


def render() -> str:
    lines = [" | ".join(["|", *(recipe.shape.name for recipe in RECIPES)]) + " |"]
    lines.append("| --- |" + " ---: |" * len(RECIPES))
    for title, cell in ROWS.items():
        lines.append(f"| {title} | " + " | ".join(cell(recipe) for recipe in RECIPES) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="Write nothing; exit with 1 if the page is out of date.")
    args = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    behind = rest.split(END)[1]
    updated = f"{before}{BEGIN}\n{render()}\n{END}{behind}"
    if args.check:
        if updated != page:
            sys.exit("docs/scaling.md is out of date: run python scripts/benchmarks/recipes.py")
    else:
        write_text(PAGE, updated)
    return 0


if __name__ == "__main__":
    sys.exit(main())
