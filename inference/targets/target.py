"""Target: a frozen transformers causal LM as the decode loop and the training code see it.

This file and those that it is made of (`target_config.py`, `target_probe.py`, `probe_tree.py`, `tree_masks.py`,
`lm_head.py`, `first_layers.py`, `encoder_decoder.py`) are the only ones that depend on how transformers
models work inside.

Legend: B batch, L prompt length, T tokens of one pass, N tree nodes, D hidden, F = len(feature_layers) * D, V target
vocabulary, S cache slots in view, W of them that a layer sees (S without a window). Hidden states are numbered as
transformers does: hs[0] embeddings, hs[i] the input of layer i, hs[n] the last state AFTER the final norm.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from inference.cache.draft_rows import DraftRows
from inference.cache.scratch_cache import ScratchCache
from inference.cache.source import Source, SourceMemory
from inference.cache.tree_cache import TreeCache
from inference.targets.backbone import Backbone
from inference.targets.encoder_decoder import PlacedDecoder
from inference.targets.encoder_decoder_probe import examine_encoder_decoder
from inference.targets.first_layers import find_final_norm, find_final_norm_gain, take_first_layers
from inference.targets.lm_head import read_weight, run_frozen
from inference.targets.masks import TreeMasks
from inference.targets.model_config import (
    check_adapters,
    describe_model,
    find_device,
    find_layer_windows,
    find_length_limit,
    find_placement,
    refuse_autocast,
    refuse_training,
    unwrap_model,
)
from inference.targets.probe import examine_model
from inference.targets.probe_tree import Findings


class Nodes(Protocol):
    """What `Target.verify` reads of a `TokenTree`, whose docstring explains it."""

    @property
    def token_ids(self) -> Tensor: ...
    @property
    def parents(self) -> Tensor: ...
    @property
    def depths(self) -> Tensor: ...
    @property
    def ancestors(self) -> Tensor: ...


@dataclass(frozen=True)
class TargetOutput:
    """logits: [B, N, V] in the model's dtype. features: [B, N, F], or None when no layers were asked for."""

    logits: Tensor
    features: Tensor | None


@dataclass(frozen=True)
class _Pass:
    """One cached forward: last_hidden [B, T, D], features [B, T, F] | None, logits [B, T, V] only in fallback mode.

    Encoder-decoder models give logits alone; their last_hidden is empty."""

    last_hidden: Tensor
    features: Tensor | None
    logits: Tensor | None


@dataclass(frozen=True)
class _Known:
    """What is kept of a model's target: nothing that keeps the model alive."""

    description: Any  # of the model when it was examined
    findings: Findings
    target: weakref.ref[Target]


_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
_known_lock = threading.Lock()


class Target:
    """A frozen causal LM, or a frozen encoder-decoder model: features, tree attention masks, positions, cache shapes.

    The model is used as it is and never changed. Construction runs some forwards of a few tokens to learn the cache's
    shapes and to prove that the model honours 4-D masks and position ids and does not keep a recurrent state.

    Attributes:
        model: the model as it was given (a PEFT model keeps its adapters).
        text_config: the config of the language model.
        hidden_size, vocab_size, num_layers: D, V (rows of the LM head), n.
        state_size: width of the last hidden state: D, but for OPT-350m and its like; None for encoder-decoder models.
        device: where everything goes in and comes out: that of the token embedding. Layers may be on others.
        dtype: of hidden states and logits; weights may be quantised.
        num_embeddings: token ids the model knows.
        embed_tokens, lm_head: the model's own modules.
        masks: what its attention masks are made with.
        is_encoder_decoder: its caches need a source (`read_source`) before the first token; it hands over no features.
        max_length: positions the target is exact for, or None; `length_limit_reason` says where the limit comes from.

    Raises:
        ValueError: for a model whose steps cannot be rolled back or verified as a tree, with the reason:
            recurrent or linear attention layers, positions that cannot be told, attention other than sdpa and eager,
            training mode, autocast to another dtype, adapters that PEFT steers by hooks of its own.
    """

    def __init__(self, model: nn.Module, *, findings: Findings | None = None) -> None:
        """Examines the model, but for `findings` that an earlier construction has left (`Target.of`)."""
        self.model: Any = model
        self._causal_lm = unwrap_model(model)
        self.text_config: Any = self._causal_lm.config.get_text_config()
        self.embed_tokens: nn.Module = self._causal_lm.get_input_embeddings()
        self.lm_head: Any = self._causal_lm.get_output_embeddings()
        weight: Tensor = self.embed_tokens.weight
        self.device: torch.device = find_device(self.embed_tokens)
        self.dtype: torch.dtype = weight.dtype if weight.dtype.is_floating_point else self._causal_lm.dtype
        refuse_autocast(self.device, self.dtype)
        self.num_embeddings: int = getattr(self.embed_tokens, "num_embeddings", weight.shape[0])
        self.hidden_size: int = self.text_config.hidden_size
        self.num_layers: int = self.text_config.num_hidden_layers
        limit = find_length_limit(self.text_config)
        self.max_length: int | None = limit.max_length
        self.length_limit_reason: str = limit.reason
        self.masks = TreeMasks(find_layer_windows(self.text_config), self.dtype)
        self._placed: PlacedDecoder | None = None
        if self._causal_lm.config.is_encoder_decoder:
            self._placed = PlacedDecoder(self._causal_lm)
        if findings is None:
            findings = self._examine()
        self.findings = findings
        if self.is_encoder_decoder:
            self.num_layers = len(findings.layer_specs)  # the config's number may be the encoder's
        self._layer_specs = findings.layer_specs
        self._scale_logits = findings.scale_logits
        self._takes_inference_mode = findings.takes_inference_mode
        self.backbone = Backbone(model, self._causal_lm, num_layers=self.num_layers, device=self.device)
        self.vocab_size: int = findings.vocab_size
        self.state_size = findings.state_size
        self._first_layers = findings.first_layers

    @classmethod
    def of(cls, model: Target | nn.Module) -> Target:
        """The target of a model: the one that an earlier call gave, if that is still in use, else a new one.

        A model is examined at the first call, and again after a change of its modules, its config, its attention
        implementation, or the shapes, dtypes or devices of its weights. The model is not kept alive.

        Raises:
            ValueError: as construction does; also for what `check_again` refuses.
        """
        if isinstance(model, Target):
            return model
        description = describe_model(model)
        with _known_lock:
            known = _known.get(model)
            if known is None or known.description != description:
                target = cls(model)
            else:
                target = known.target() or cls(model, findings=known.findings)
                target.check_again()
            _known[model] = _Known(description, target.findings, weakref.ref(target))
        return target

    def _examine(self) -> Findings:
        if self._placed is not None:
            return examine_encoder_decoder(self._causal_lm, self._placed, self.masks.from_allowed, self.device)
        return examine_model(self._causal_lm, self.text_config, self.masks.from_allowed, self.device)

    @property
    def is_encoder_decoder(self) -> bool:
        return self._placed is not None

    @property
    def placement(self) -> tuple[tuple[str, int], ...]:
        """Where the weights are: (device, number of tensors in a row), in the order of the model's modules."""
        return find_placement(self._causal_lm)

    def check_again(self) -> None:
        """Refuses (ValueError), as construction does, what may have come since: adapters, autocast."""
        check_adapters(self.model)
        refuse_autocast(self.device, self.dtype)

    @torch.no_grad()
    def encode_source(self, token_ids: Tensor, mask: Tensor) -> Source:
        """Source texts [B, E] long, mask [B, E] 1 on real tokens, through an encoder-decoder model's encoder."""
        encoder = self._causal_lm.get_encoder()
        states = encoder(input_ids=token_ids, attention_mask=mask, return_dict=True).last_hidden_state
        return Source(token_ids, mask.bool(), states.to(self.device))

    def read_source(self, cache: TreeCache, source: Source) -> None:
        """What the rows of an encoder-decoder target's cache are about, until the cache is reset."""
        cache.source = SourceMemory(source)

    def without_autograd(self) -> AbstractContextManager[None]:
        """What decoding runs in: inference mode, or where the model's weights do not run in it, without gradients."""
        return torch.inference_mode() if self._takes_inference_mode else torch.no_grad()

    def new_cache(self, batch_size: int, capacity: int) -> TreeCache:
        """A zeroed cache of `capacity` slots per row: the longest sequence plus the largest tree."""
        return TreeCache(self._layer_specs, batch_size, capacity, device=self.device)

    def new_scratch_cache(self, batch_size: int, *, max_tokens: int, num_scratch: int) -> ScratchCache:
        """A zeroed cache for a model that drafts (see `ScratchCache`)."""
        return ScratchCache(
            self._layer_specs, batch_size, max_tokens=max_tokens, num_scratch=num_scratch, device=self.device
        )

    @torch.no_grad()
    def prefill(
        self,
        cache: TreeCache,
        token_ids: Tensor,
        counts: Tensor,
        *,
        feature_layers: Sequence[int] = (),
        chunk_size: int = 512,
    ) -> TargetOutput:
        """Read prompts, or their continuation when the cache already holds tokens, and commit them.

        Args:
            token_ids: [B, L] long, right-padded with any valid id.
            counts: [B] long, real tokens per row; 0 leaves a row unchanged (its logits mean nothing).
            feature_layers: hidden states to hand over, in this order.
            chunk_size: tokens per forward, so that no [L, L] mask is built.

        Returns:
            logits [B, 1, V] of each row's last real token and features [B, L, F] of all of them (padding: unspecified).

        Raises:
            ValueError: if the prompt exceeds the cache or the target's `max_length`.
        """
        length = token_ids.shape[1]
        if self.max_length is not None and cache.length_bound + length > self.max_length:
            raise ValueError(
                f"{length} tokens behind {cache.length_bound} exceed the target's {self.max_length} positions "
                f"({self.length_limit_reason}): shorten the prompt"
            )
        features, last = [], None
        for start in range(0, length, chunk_size):
            chunk = token_ids[:, start : start + chunk_size]
            size = chunk.shape[1]
            real = (counts - start).clamp(0, size)  # [B] real tokens of this chunk
            steps = torch.arange(size, device=counts.device)
            depths = torch.minimum(steps, (real[:, None] - 1).clamp(min=0))  # padding never runs ahead of real tokens
            causal = (steps[:, None] >= steps).expand(chunk.shape[0], size, size)
            cache.open_slots(size, num_ahead=start)  # rows that still have tokens took every chunk before whole
            output = self._forward_cached(cache, chunk, depths, causal, feature_layers)
            has_tokens = counts > start
            source = output.last_hidden if output.logits is None else output.logits
            row_last = source[torch.arange(len(counts), device=source.device), (real - 1).clamp(min=0)]
            last = row_last if last is None else torch.where(has_tokens[:, None], row_last, last)
            if output.features is not None:
                features.append(output.features)
            cache.advance(real, size)
        if last is None:
            raise ValueError("an empty prompt has no next token: give at least one token")
        logits = self.compute_logits(last) if self._scale_logits else last
        joined = torch.cat(features, dim=1) if len(features) > 1 else features[0] if features else None
        return TargetOutput(logits[:, None], joined)

    @torch.no_grad()
    def verify(self, cache: TreeCache, tree: Nodes, *, feature_layers: Sequence[int] = ()) -> TargetOutput:
        """Score every node of a tree in one forward; nothing is committed.

        Node i sees the row's committed tokens and its own ancestors, at position lengths + depth. Positions are cut at
        the target's `max_length`: no token behind that limit may be emitted, so such nodes only must not do harm.

        Returns:
            logits [B, N, V] (of the token that follows each node) and features [B, N, F].
        """
        cache.open_slots(tree.token_ids.shape[1])
        return self.verify_opened(cache, tree, feature_layers=feature_layers)

    @torch.no_grad()
    def verify_opened(self, cache: TreeCache, tree: Nodes, *, feature_layers: Sequence[int] = ()) -> TargetOutput:
        """`verify` behind `cache.open_slots(N)`; it reads no number of the host but the size of the cache's view."""
        depths = tree.depths.clamp(min=0).where(tree.parents >= 0, torch.zeros_like(tree.depths))
        output = self._forward_cached(cache, tree.token_ids, depths, tree.ancestors, feature_layers)
        logits = output.logits if output.logits is not None else self.compute_logits(output.last_hidden)
        return TargetOutput(logits, output.features)

    def prepare_first_layers(self, num_layers: int) -> None:
        """Makes `run_first_layers` ready for so many layers; they share all weights with the model.

        Raises:
            ValueError: if the model has no such layers, or does not run as its first layers alone.
        """
        if num_layers not in self._first_layers:
            self._first_layers[num_layers] = take_first_layers(self._causal_lm, num_layers)

    @torch.no_grad()
    def run_first_layers(self, rows: DraftRows, token_ids: Tensor, ancestors: Tensor, *, num_layers: int) -> Tensor:
        """hidden_states[num_layers] of one drafted level: [B, W, D].

        Args:
            rows: with the level's rows open.
            token_ids: [B, W] long.
            ancestors: [B, W, R] bool, which of the draft's rows each token sees, itself included; all see the committed
                tokens.
            num_layers: as given to `prepare_first_layers`.
        """
        node_positions = self._cut_positions(rows.lengths[:, None] + rows.depths)
        positions = self._cut_positions(rows.lengths[:, None] + rows.depth).expand_as(token_ids)
        masks = self.masks.in_view(rows, positions, node_positions, ancestors)
        output = self.backbone.run(self._first_layers[num_layers], token_ids, positions, masks, rows)
        hidden: Tensor = output.last_hidden_state
        return hidden.to(self.device)

    @torch.no_grad()
    def score_opened(
        self,
        cache: ScratchCache,
        token_ids: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        *,
        tree_depths: Tensor | None = None,
        read: Tensor | None = None,
    ) -> Tensor:
        """Logits for drafting: [B, W] tokens whose slots are open, at positions lengths + depths; nothing is committed.

        Args:
            depths: [B, W] long.
            ancestors: [B, W, T] bool, which of the T slots of the tree (`ScratchCache.tree_slots`) each token sees
                besides the certain ones; itself included.
            tree_depths: [1 or B, T] long, positions of the tree's slots, less lengths; None = `depths`.
            read: [B, R] long, the tokens whose logits are wanted; None = all.

        Returns:
            [B, R or W, V] of the tokens that follow.
        """
        output = self._forward_cached(cache, token_ids, depths, ancestors, (), tree_depths)
        source = output.last_hidden if output.logits is None else output.logits
        if read is not None:
            source = source.gather(1, read[..., None].expand(-1, -1, source.shape[-1]))
        return self.compute_logits(source) if output.logits is None else source

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The model's own logits [..., V] of post-norm states [..., D], soft-capping and scales included.

        Differentiable with respect to `hidden` alone: the LM head is frozen, whatever its parameters ask for.
        """
        if self._scale_logits is None:
            raise ValueError(
                f"{type(self._causal_lm).__name__} does more between its last hidden state and its logits than an LM "
                f"head with final_logit_softcapping or a scale, so logits cannot be computed from hidden states alone"
            )
        return self._scale_logits(run_frozen(self.lm_head, hidden))

    def lm_head_weight(self) -> Tensor:
        """[V, D] in the target's dtype, whatever the LM head stores (see `read_weight`). Not to be changed."""
        return read_weight(self.lm_head, (self.vocab_size, self.hidden_size), self.dtype, self.device)

    def final_norm_gain(self) -> Tensor | None:
        """What the model's final norm multiplies each channel by ([D], its dtype), or None when it has no such norm."""
        return find_final_norm_gain(self._causal_lm)

    @property
    def final_norm(self) -> nn.Module | None:
        """The model's own norm behind its last layer, or None when it has no such norm."""
        return find_final_norm(self._causal_lm)

    def _cut_positions(self, positions: Tensor) -> Tensor:
        return positions if self.max_length is None else positions.clamp(max=self.max_length - 1)

    def _forward_cached(
        self,
        cache: TreeCache,
        token_ids: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        feature_layers: Sequence[int],
        tree_depths: Tensor | None = None,
    ) -> _Pass:
        """Run [B, N] tokens, whose slots are open, at lengths + depths; each sees the committed tokens and its
        ancestors [B, N, T] among the slots of the tree: the open ones, or those at `tree_depths` [1 or B, T]."""
        positions = self._cut_positions(cache.lengths[:, None] + depths)
        tree_positions = positions if tree_depths is None else cache.lengths[:, None] + tree_depths
        masks = self.masks.in_view(cache, positions, tree_positions, ancestors)
        if self._placed is not None:
            if feature_layers:
                self.refuse_features()
            refuse_training(self.model)
            logits = self._placed.run_opened(cache, token_ids, positions, tree_positions, masks)
            return _Pass(logits[..., :0], None, logits)
        if self._scale_logits is not None:
            states = self.backbone.read(token_ids, positions, masks, cache, feature_layers=feature_layers)
            return _Pass(states.last, states.features, None)
        states, logits = self.backbone.read_with_logits(
            token_ids, positions, masks, cache, feature_layers=feature_layers
        )
        return _Pass(states.last, states.features, logits)

    def refuse_features(self) -> None:
        """Refuses (ValueError) an encoder-decoder target, which hands over no hidden states."""
        if self._placed is not None:
            raise ValueError(
                f"{type(self._causal_lm).__name__} is an encoder-decoder model, of which no hidden states are handed "
                f"over: draft with a SmallModelDrafter or an NgramDrafter; trained heads need a decoder-only target"
            )
