"""Held-out prompts decoded with the trained heads, with the tokens that were drafted."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference import Decoder, GenerationStats
from draftsmith.inference.streaming.detokenizer import IncrementalDetokenizer
from draftsmith.inference.streaming.token_stream import TokenStream
from draftsmith.inference.targets.multimodal import take_media

# A prompt's token ids [1, L] as `input_ids`, and a processor's inputs for its images.
Prompt = dict[str, Tensor]


@dataclass(frozen=True)
class Piece:
    """Text of adjacent tokens that were all drafted and accepted, or that all came from the target."""

    text: str
    is_drafted: bool


@dataclass(frozen=True)
class Example:
    """A prompt and its greedy reply."""

    prompt: str
    pieces: list[Piece]
    acceptance_length: float


def decode_examples(
    decoder: Decoder, prompts: Sequence[Prompt], tokenizer: Any, *, max_new_tokens: int
) -> tuple[list[Example], GenerationStats]:
    """Decodes prompts greedily; returns the examples and the statistics of all of them."""
    examples, total = [], GenerationStats()
    for prompt in prompts:
        stream = stream_prompt(decoder, prompt, tokenizer, max_new_tokens=max_new_tokens)
        detokenizer = IncrementalDetokenizer(tokenizer)
        texts = [
            (detokenizer.add(token_id), index < tokens.num_drafted)
            for tokens in stream
            for index, token_id in enumerate(tokens)
        ]
        texts.append((detokenizer.flush(), False))
        written = groupby(((text, is_drafted) for text, is_drafted in texts if text), key=lambda entry: entry[1])
        pieces = [Piece("".join(text for text, _ in group), is_drafted) for is_drafted, group in written]
        text = str(tokenizer.decode(prompt["input_ids"][0], skip_special_tokens=False))
        examples.append(Example(text, pieces, stream.output.stats.acceptance_length))
        total += stream.output.stats
    return examples, total


def stream_prompt(decoder: Decoder, prompt: Prompt, tokenizer: Any, *, max_new_tokens: int) -> TokenStream:
    """Decodes a prompt greedily. The tokenizer finds stop strings of the generation config."""
    input_ids = prompt["input_ids"].to(decoder.target.device)
    media: dict[str, Any] = take_media(
        decoder.target, {name: value for name, value in prompt.items() if name != "input_ids"}
    )
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "tokenizer": tokenizer}
    return decoder.stream(input_ids, torch.ones_like(input_ids), **media, **options)


def send_examples(examples: Sequence[Example], report_to: Any) -> None:
    """Adds a table of prompts, replies and acceptance lengths to the wandb run, if there is one; transformers sends the
    metrics of `report_to`."""
    if "wandb" not in report_to:
        return
    import wandb

    rows = [
        [example.prompt, "".join(piece.text for piece in example.pieces), example.acceptance_length]
        for example in examples
    ]
    if wandb.run is not None:
        wandb.log({"examples": wandb.Table(columns=["prompt", "reply", "acceptance length"], data=rows)})
