"""Ways to decode greedily, with the logits each token was chosen from: transformers' own and ours.

Legend: N tree nodes, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inference import Decoder, Drafter, Target
from inference.cache.tree_cache import TreeCache
from inference.targets.target import TargetOutput
from inference.trees.token_tree import TokenTree
from scripts.benchmarks.divergence_count import Decode, Decoded


@dataclass
class Contender:
    """One way to decode. segment: it is called anew after so many tokens (see `count_divergences`); is_faulty: it has a
    fault on purpose, and shows what one looks like."""

    name: str
    decode: Decode
    segment: int | None = None
    is_faulty: bool = False


class TransformersGreedy:
    """The model's own `generate`, with options of its own speculation."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model
        self.options = options
        self.num_layers = model.config.num_hidden_layers
        self.num_passes = 0

    @torch.no_grad()
    def __call__(self, prefix: tuple[int, ...], max_new_tokens: int) -> Decoded:
        input_ids = torch.tensor([prefix], device=self.model.device)
        self.num_passes = 0
        handle = self.model.register_forward_pre_hook(self._count)
        try:
            output = self.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
                **self.options,
            )
        finally:
            handle.remove()
        return check_decoded(output.sequences[0, len(prefix) :].tolist(), torch.cat(output.logits), self.num_passes)

    def _count(self, model: Any, _: Any) -> None:
        # While it drafts with its own first layers, transformers changes the model's configuration.
        self.num_passes += model.config.num_hidden_layers == self.num_layers


class RecordingTarget(Target):
    """A target that keeps each pass's tree (None for a prompt) and logits [N, V]."""

    def __init__(self, model: Any) -> None:
        self.passes: list[tuple[TokenTree | None, Tensor]] = []
        super().__init__(model)

    def prefill(self, cache: TreeCache, *args: Any, **kwargs: Any) -> TargetOutput:
        output = super().prefill(cache, *args, **kwargs)
        self.passes.append((None, output.logits[0]))
        return output

    def verify_opened(self, cache: TreeCache, tree: TokenTree, *, feature_layers: Sequence[int] = ()) -> TargetOutput:
        output = super().verify_opened(cache, tree, feature_layers=feature_layers)
        self.passes.append((tree, output.logits[0]))
        return output


class FaultyTarget(RecordingTarget):
    """Reads what was drafted one position too far; everything else is right."""

    def verify_opened(self, cache: TreeCache, tree: TokenTree, *, feature_layers: Sequence[int] = ()) -> TargetOutput:
        return super().verify_opened(cache, replace(tree, depths=tree.depths + 1), feature_layers=feature_layers)


class OurGreedy:
    """A `Decoder` on a recording target, batch 1, eager."""

    def __init__(self, target: RecordingTarget, drafter: Drafter | None = None, tree: Any = None) -> None:
        self.target = target
        self.decoder = Decoder(target, drafter, tree=tree)

    @torch.no_grad()
    def __call__(self, prefix: tuple[int, ...], max_new_tokens: int) -> Decoded:
        self.target.passes.clear()
        input_ids = torch.tensor([prefix], device=self.target.device)
        output = self.decoder.generate(
            input_ids, torch.ones_like(input_ids), max_new_tokens=max_new_tokens, do_sample=False
        )
        token_ids = output.sequences[0, len(prefix) :].tolist()
        rows = torch.cat([walk(tree, logits) for tree, logits in self.target.passes])
        return check_decoded(token_ids, rows[: len(token_ids)], len(self.target.passes))


def walk(tree: TokenTree | None, logits: Tensor) -> Tensor:
    """The rows of a pass's logits [N, V] that a greedy walk from the root reads: a row for each token it emits."""
    if tree is None:
        return logits[-1:]
    tokens, parents = tree.token_ids[0].tolist(), tree.parents[0].tolist()
    chosen = logits.argmax(dim=1).tolist()
    path: list[int] = []
    node: int | None = 0
    while node is not None:
        path.append(node)
        best = chosen[node]
        children = (child for child, parent in enumerate(parents) if parent == path[-1])
        node = next((child for child in children if tokens[child] == best), None)
    return logits[path]


def check_decoded(token_ids: list[int], logits: Tensor, num_passes: int) -> Decoded:
    """Tokens with their logits, which must be those that the tokens were chosen from.

    Raises:
        RuntimeError: when a token is not the maximum of its row.
    """
    if logits.argmax(dim=1).tolist() != token_ids:
        raise RuntimeError("the logits that were kept are not those that the tokens were chosen from")
    return Decoded(token_ids, logits, num_passes)


def with_control(name: str, plain: Decode, segment: int | None) -> list[Contender]:
    """Plain decoding, and, as a control without any drafts, plain decoding that is called anew every `segment` tokens:
    what it then reads as a prompt was decoded token by token before."""
    control = [] if segment is None else [Contender(f"{name}, called anew every {segment} tokens", plain, segment)]
    return [Contender(name, plain), *control]


def make_transformers(model: Any, *, early_exit: int | None, segment: int | None) -> list[Contender]:
    """transformers' own ways to decode; the first is plain decoding.

    Args:
        early_exit: layers of the model that draft for it; None leaves that out.
        segment: see `with_control`.
    """
    contenders = with_control("transformers generate", TransformersGreedy(model), segment)
    contenders.append(Contender("transformers prompt look-up", TransformersGreedy(model, prompt_lookup_num_tokens=10)))
    if early_exit is not None:
        name = f"transformers, assisted by its own first {early_exit} layers"
        contenders.append(Contender(name, TransformersGreedy(model, assistant_early_exit=early_exit)))
    # A copy of the target agrees with it nearly always, so that nearly every token comes from a wide pass.
    assistant = TransformersGreedy(model, assistant_model=copy.deepcopy(model))
    contenders.append(Contender("transformers, assisted by a copy of the target", assistant))
    return contenders
