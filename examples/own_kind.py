"""A kind of heads of your own: one config, one class, one registration. This one scores bigrams.

    python examples/own_kind.py

For `draftsmith train --head_type bigram`, let your package name the class in its pyproject.toml:

    [project.entry-points."draftsmith.heads"]
    bigram = "your_package.bigram:BigramHeads"
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from draftsmith import DraftHeads, DraftHeadsConfig, DraftLogits, DraftStep, create_heads, generate, register


class BigramConfig(DraftHeadsConfig):
    model_type = "draftsmith_bigram"
    head_type = "bigram"

    def __init__(self, *, rank: int = 8, **kwargs: Any) -> None:
        self.rank = rank
        super().__init__(**kwargs)


@register
class BigramHeads(DraftHeads):
    """Scores the next token from the last one only; reads no feature of the target."""

    config_class = BigramConfig

    def __init__(self, config: BigramConfig) -> None:
        super().__init__(config)
        self.down = nn.Embedding(config.target_vocab_size, config.rank)
        self.up = nn.Linear(config.rank, config.target_vocab_size)
        self.post_init()

    @property
    def num_unrolled_steps(self) -> int:
        return 1

    def unroll(self, features: Tensor, input_ids: Tensor) -> list[DraftStep]:
        ahead = nn.functional.pad(input_ids[:, 1:], (0, 1))  # slot t has read token t + 1, and predicts t + 2
        return [DraftStep(2, self.down(ahead), self.up)]

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> None: ...

    def extend(
        self, state: Any, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        return self.expand(state, next_token_ids.gather(1, (counts - 1).clamp(min=0)[:, None]), counts, 0)

    def expand(self, state: Any, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        return DraftLogits(self.up(self.down(token_ids)))


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained("examples/chat-13m", dtype="float32")
    prompt = torch.tensor([[1, 300, 301, 302]])
    text = generate(model, None, prompt, max_new_tokens=200, do_sample=False).sequences
    heads = create_heads("bigram", model, rank=64)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=0.01)
    for _ in range(60):  # on the target's own text; `draftsmith train` does this on conversations
        (step,) = heads(text.new_zeros(*text.shape, 0), text)
        loss = nn.functional.cross_entropy(step.head(step.hidden[0, :-2]), text[0, 2:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    output = generate(model, heads, prompt, max_new_tokens=200, do_sample=False)
    print(f"{output.stats.acceptance_length:.2f} tokens a step; same text: {torch.equal(output.sequences, text)}")


if __name__ == "__main__":
    main()
