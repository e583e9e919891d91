"""Target: a frozen transformers model as the decode loop and the training code see it.

In decoding, only this package depends on how transformers models work inside.

Legend: B batch, L prompt length, T tokens of one pass, N tree nodes, D hidden, F = len(feature_layers) * D, V target
vocabulary, S cache slots in view, W of them that a layer sees (S without a window). `Backbone` says how hidden states
are numbered.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from draftsmith.inference.cache.kv_cache import EMPTY, KVCache, Span
from draftsmith.inference.cache.shared_rows import SharedRows
from draftsmith.inference.cache.source import Source, SourceMemory
from draftsmith.inference.cache.tree_rows import TreeRowsCache
from draftsmith.inference.kernels.attention import can_use_kernel, fits_kernel
from draftsmith.inference.kernels.packed_weights import follow_adapters, is_packed, pack
from draftsmith.inference.targets.backbone import Backbone, PassOutput, TargetOutput
from draftsmith.inference.targets.encoder_decoder import PlacedDecoder
from draftsmith.inference.targets.masks import Nodes, TreeMasks
from draftsmith.inference.targets.model_config import (
    check_adapters,
    find_device,
    find_layer_windows,
    find_length_limit,
    find_types_without_attention,
    refuse_autocast,
    refuse_training,
    unwrap_model,
)
from draftsmith.inference.targets.parts import (
    count_layer_parameters,
    find_final_norm,
    find_final_norm_gain,
    read_weight,
    run_frozen,
    take_first_layers,
)
from draftsmith.inference.targets.probing.invariance import find_mode, prefer_mode
from draftsmith.inference.targets.probing.known_models import describe_model, find_known
from draftsmith.inference.targets.probing.probe import Capabilities, probe_encoder_decoder, probe_model
from draftsmith.inference.targets.ragged import RaggedRows
from draftsmith.inference.targets.recurrent.finding import find_recurrence
from draftsmith.inference.targets.recurrent.proving import check_rollback
from draftsmith.inference.targets.recurrent.replayable_layers import ReplayableLayers


class Target:
    """A frozen causal LM or encoder-decoder model: its features, tree attention masks, positions and cache shapes.

    The model is never changed. Construction runs a few passes of four tokens. They show what the layers write into a
    cache, that the model follows 4-D masks and position ids, and that recurrent states can be rolled back.

    Attributes:
        model: the model as it was given (a PEFT model keeps its adapters).
        text_config: the config of the language model.
        hidden_size, vocab_size, num_layers: D, V (rows of the LM head), n.
        state_size: width of the last hidden state, D except in OPT-350m and its like; None: encoder-decoder models.
        device: the token embedding's. Inputs and outputs are there; layers may be on other devices.
        dtype: of hidden states and logits; weights may be quantised.
        num_embeddings: number of token ids the model knows.
        embed_tokens, lm_head: the model's own modules.
        masks: makes the model's attention masks.
        is_batch_invariant: whether this is the target in batch-invariant mode (see `batch_invariant`).
        min_pass_tokens: a pass has at least this many tokens per row of the batch; 1 outside of that mode.
        is_encoder_decoder: caches need a source (`read_source`) before the first token, and there are no features.
        max_length: positions for which the target is exact, or None; `length_limit_reason` says where it comes from.
        capabilities: what the passes of construction found.
        is_packed: whether linear layers have packed weights (`with_packed_weights`).

    Raises:
        ValueError: the model's steps cannot be rolled back or verified as a tree. The message gives the reason:
            recurrent states outside of the cache, positions that cannot be given, attention other than sdpa and eager,
            training mode, autocast to another dtype, adapters that PEFT steers with its own hooks.
    """

    def __init__(self, model: nn.Module, *, capabilities: Capabilities | None = None) -> None:
        """Probes the model, unless the `capabilities` of an earlier construction are given (`Target.of`)."""
        self.model: Any = model
        self.is_packed = is_packed(model)
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
        self.max_length, self.length_limit_reason = limit.max_length, limit.reason
        self.masks = TreeMasks(
            find_layer_windows(self.text_config), self.dtype, find_types_without_attention(self.text_config)
        )
        self.is_batch_invariant, self.min_pass_tokens = False, 1
        self._placed = PlacedDecoder(self._causal_lm) if self._causal_lm.config.is_encoder_decoder else None
        recurrence = find_recurrence(self._causal_lm, self.device) if capabilities is None else capabilities.recurrence
        self._recurrent_layers = None if recurrence is None else ReplayableLayers(self._causal_lm, recurrence)
        self._runnable = self._causal_lm if self._recurrent_layers is None else self._recurrent_layers.causal_lm
        self.capabilities = capabilities or self._probe()
        self.masks = self._choose_masks()
        if self.is_encoder_decoder:
            self.num_layers = len(self.capabilities.layer_specs)  # the config's number may be the encoder's
        self.vocab_size: int = self.capabilities.vocab_size
        self.state_size = self.capabilities.state_size
        self._has_plain_logits = getattr(self.capabilities.scale_logits, "is_plain", False)
        self.backbone = Backbone(
            model, self._runnable, num_layers=self.num_layers, device=self.device, dtype=self.dtype
        )
        if capabilities is None and self.is_recurrent:
            check_rollback(self)

    @classmethod
    def of(cls, model: Target | nn.Module) -> Target:
        """The target of a model: the one of an earlier call if somebody still holds it, else a new one.

        The model is examined at the first call, and again after a change that `describe_model` sees. No model is kept
        alive.

        Raises:
            ValueError: construction or `check_again` refuses the model.
        """
        if isinstance(model, Target):
            return model
        description = describe_model(model)
        known = find_known(model)
        with known.lock:
            if known.description != description:
                target = cls(model)
            else:
                target = known.find_target() or cls(model, capabilities=known.capabilities)
                target.check_again()
            known.description, known.capabilities = description, target.capabilities
            known.find_target = weakref.ref(target)
        return target

    def with_packed_weights(self) -> Target:
        """A target of the same model whose linear layers have packed weights, which take their memory once more. Heads
        and small models that draft for it are packed, too. It keeps the weights of this moment, and follows a switch of
        adapters.

        Raises:
            ValueError: no layer can be packed.
        """
        if self.is_packed:
            return self
        packed = Target(pack(self.model), capabilities=self.capabilities.of_a_twin())
        if not packed.is_packed:
            raise ValueError(
                "pack_weights packs linear layers on a CPU, in float32, and in bfloat16 with AVX-512; this target "
                f"({type(self.model).__name__}, {self.dtype} on {self.device}) has none: leave the option out"
            )
        return packed.batch_invariant() if self.is_batch_invariant else packed

    def _probe(self) -> Capabilities:
        if self._placed is not None:
            return probe_encoder_decoder(self._causal_lm, self._placed, self.masks, self.device)
        return probe_model(self._runnable, self.text_config, self.masks, self.device, self._recurrent_layers)

    def _choose_masks(self) -> TreeMasks:
        """Packed masks where the model takes them and something reads them: the kernels, or prompts on a CPU."""
        planes = [plane for spec in self.capabilities.layer_specs if spec for plane in (spec.keys, spec.values)]
        fits = all(fits_kernel(plane.dtype, plane.width) for plane in planes)
        takes_packed = self.capabilities.takes_packed_masks
        packs_all = takes_packed and fits and can_use_kernel(self.device)
        packs_prompts = takes_packed and self.device.type == "cpu"
        return replace(self.masks, packs_prompts=packs_prompts, packs_all=packs_all)

    @property
    def is_encoder_decoder(self) -> bool:
        return self._placed is not None

    @property
    def is_recurrent(self) -> bool:
        """Whether layers have recurrent states, which cannot be cut back to any length (`KVCache.held_length`)."""
        return self._recurrent_layers is not None

    @property
    def reads_prompts_whole(self) -> bool:
        """Whether a prompt is best read in one pass: what comes after it is read token by token."""
        return self._recurrent_layers is not None and not self._recurrent_layers.recurrence.continues

    def refuse_recurrent(self, purpose: str, cure: str) -> None:
        """Refuses (ValueError) a target with recurrent layers."""
        if self.is_recurrent:
            raise ValueError(f"{type(self._causal_lm).__name__} has recurrent layers, so {purpose}: {cure}")

    def batch_invariant(self) -> Target:
        """This target in batch-invariant mode: a token's scores do not depend, in a single bit, on the number of tokens
        in the pass, on its place in a tree, or on the other rows of the batch. Attention is in Triton, or adds in
        float64 (`attend_exactly`), passes have `min_pass_tokens`, and products the rows of one kernel (`fix_rows`).

        Raises:
            ValueError: the model's attention cannot be replaced, or its scores still depend on other tokens.
        """
        mode: Target | str = find_mode(self)
        if isinstance(mode, str):
            raise ValueError(f"batch_invariant=True cannot be kept: {mode}. Leave batch_invariant out")
        return mode

    def prefer_batch_invariant(self, *, warns: bool = True) -> Target:
        """`batch_invariant()` where drafts could change texts and the mode costs some percent of a step: in bfloat16
        and float16 on a CPU. Where it cannot be kept, this target, and the log says why, once, if it `warns`."""
        mode: Target = prefer_mode(self, warns=warns)
        return mode

    def check_again(self) -> None:
        """Refuses (ValueError) adapters and autocast that construction would refuse and that came later."""
        follow_adapters(self.model)
        check_adapters(self.model)
        refuse_autocast(self.device, self.dtype)
        if self._recurrent_layers is not None:
            self._recurrent_layers.check_again()

    @torch.no_grad()
    def encode_source(self, token_ids: Tensor, mask: Tensor) -> Source:
        """Runs an encoder-decoder model's encoder on source texts [B, E] long; mask [B, E] is 1 on real tokens."""
        encoder = self._causal_lm.get_encoder()
        states = encoder(input_ids=token_ids, attention_mask=mask, return_dict=True).last_hidden_state
        return Source(token_ids, mask.bool(), states.to(self.device))

    def read_source(self, cache: KVCache, source: Source) -> None:
        """Gives the rows of an encoder-decoder target's cache their source, until the cache is reset."""
        cache.source = SourceMemory(source)

    def without_autograd(self) -> AbstractContextManager[None]:
        """The context that decoding runs in: inference mode, or no_grad for weights that refuse inference mode."""
        return torch.inference_mode() if self.capabilities.takes_inference_mode else torch.no_grad()

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        """A zeroed cache with `capacity` slots per row: room for the longest sequence and the largest tree."""
        states = None if self._recurrent_layers is None else self._recurrent_layers.new_states(batch_size)
        return KVCache(self.capabilities.layer_specs, batch_size, capacity, device=self.device, states=states)

    def new_tree_rows_cache(self, batch_size: int, *, max_tokens: int, num_scratch: int) -> TreeRowsCache:
        """A zeroed cache for a model that drafts (see `TreeRowsCache`)."""
        self.refuse_recurrent("it cannot draft as a small model", "take one with attention only, or trained heads")
        specs = [spec for spec in self.capabilities.layer_specs if spec is not None]
        return TreeRowsCache(specs, batch_size, max_tokens=max_tokens, num_scratch=num_scratch, device=self.device)

    @torch.no_grad()
    def prefill(
        self,
        cache: KVCache,
        token_ids: Tensor,
        counts: Tensor,
        *,
        span: Span = EMPTY,
        feature_layers: Sequence[int] = (),
    ) -> TargetOutput:
        """Reads prompts, or their continuation when the cache already holds tokens, in one pass, and commits them.

        Args:
            token_ids: [B, L] long, right-padded with any valid id.
            counts: [B] long, real tokens per row. A row with 0 is left unchanged, and its logits mean nothing.
            span: of the tokens that the cache holds, in rows with a count.
            feature_layers: hidden states to hand over, in this order.

        Returns:
            logits [B, 1, V] of each row's last real token; features [B, L, F] (and last states) of all tokens.
        """
        length = token_ids.shape[1]
        size = max(length, self.min_pass_tokens)
        steps = torch.arange(size, device=counts.device)
        depths = torch.minimum(steps, (counts[:, None] - 1).clamp(min=0))  # padding never runs ahead of real tokens
        cache.open_slots(size, span)
        positions = self._cut_positions(cache.lengths[:, None] + depths)
        masks = self.masks.of_prompts(cache, positions)
        self.plan_reading(cache, counts)
        token_ids = nn.functional.pad(token_ids, (0, size - length))
        places = cache.to_positions(positions)
        output = self._run(cache, token_ids, places, masks, positions, feature_layers)
        cache.advance(counts)
        scores = output.last if output.logits is None else output.logits
        last = scores[torch.arange(len(counts), device=scores.device), (counts - 1).clamp(min=0)]
        if output.logits is None:
            rows = last.repeat(-(-self.min_pass_tokens // len(last)), 1)
            last = self.compute_logits(rows)[: len(last)]
        if output.features is None:
            return TargetOutput(last[:, None])
        return TargetOutput(last[:, None], output.features[:, :length], output.last[:, :length])

    def plan_reading(self, cache: KVCache, counts: Tensor) -> None:
        """Before a pass over prompts: recurrent layers will read the first counts[b] tokens."""
        if self._recurrent_layers is not None:
            self._recurrent_layers.plan_reading(cache.states, counts)

    @torch.no_grad()
    def verify(self, cache: KVCache, tree: Nodes, *, feature_layers: Sequence[int] = ()) -> TargetOutput:
        """Scores every node of a tree in one forward pass, after `cache.open_slots(N, span)`, or more; commits nothing.

        Node i stands at position lengths + depth and sees the row's committed tokens and its own ancestors. Without
        `widths` and recurrent layers, the only host number that is read is the size of the cache's view.

        Returns:
            logits [B, N, V] of the token that follows each node, features [B, N, F] and last states [B, N, D].
        """
        depths = tree.depths.clamp(min=0).where(tree.parents >= 0, torch.zeros_like(tree.depths))
        token_ids, ancestors, num_nodes = tree.token_ids, tree.ancestors, tree.token_ids.shape[1]
        if missing := cache.slots.shape[1] - num_nodes:  # nodes that see the root and that nobody sees
            token_ids, depths = (nn.functional.pad(values, (0, missing)) for values in (token_ids, depths))
            ancestors = nn.functional.pad(ancestors, (0, missing, 0, missing))
            ancestors[:, num_nodes:, 0] = True
        ragged = None
        if tree.widths is not None and tree.num_read < tree.token_ids.numel():
            ragged = RaggedRows(tree.widths, num_nodes)
        if self._recurrent_layers is not None:
            self._recurrent_layers.plan_drafting(cache.states, nn.functional.pad(tree.parents, (0, missing), value=-1))
        output = self._forward_cached(cache, token_ids, depths, ancestors, feature_layers, ragged=ragged)
        logits = output.logits if output.logits is not None else self.compute_logits(output.last)
        if ragged is not None:
            features = None if output.features is None else ragged.unpack(output.features)
            return TargetOutput(ragged.unpack(logits), features, ragged.unpack(output.last))
        features = None if output.features is None else output.features[:, :num_nodes]
        return TargetOutput(logits[:, :num_nodes], features, output.last[:, :num_nodes])

    @property
    def reads_ragged_rows(self) -> bool:
        """Whether trees of different sizes can be read without the padding between them: on a CPU, where masks reach
        our attention as they are, and no layer depends on the order of the tokens or on the rows of the batch."""
        takes_marks = self.capabilities.takes_packed_masks and self.capabilities.scale_logits is not None
        is_plain = self._recurrent_layers is None and self._placed is None
        devices = {self.device.type, *(spec.keys.device.type for spec in self.capabilities.layer_specs if spec)}
        is_slow = self.is_batch_invariant or self.masks.packs_all
        return takes_marks and is_plain and devices == {"cpu"} and not is_slow

    def prepare_first_layers(self, num_layers: int) -> None:
        """Makes `run_first_layers` ready for the first `num_layers` layers, which share all weights with the model.

        Raises:
            ValueError: the model has no such layers, they are recurrent, or they do not run by themselves.
        """
        if self._recurrent_layers is not None and min(self._recurrent_layers.recurrence.mixers) < num_layers:
            self.refuse_recurrent(
                f"its first {num_layers} layers cannot draft", "use heads of another kind, which read features"
            )
        if num_layers not in self.capabilities.first_layers:
            self.capabilities.first_layers[num_layers] = take_first_layers(self._causal_lm, num_layers)

    @torch.no_grad()
    def run_first_layers(self, rows: SharedRows, token_ids: Tensor, ancestors: Tensor, *, num_layers: int) -> Tensor:
        """hidden_states[num_layers] of one drafted level: [B, W, D].

        Args:
            rows: the level's rows are open.
            token_ids: [B, W] long.
            ancestors: [B, W, R] bool, which of the draft's rows each token sees, itself included. Every token also sees
                the committed tokens.
            num_layers: as given to `prepare_first_layers`.
        """
        node_positions = self._cut_positions(rows.lengths[:, None] + rows.depths)
        positions = self._cut_positions(rows.lengths[:, None] + rows.depth).expand_as(token_ids)
        masks = self.masks.in_view(rows, positions, node_positions, ancestors)
        places = rows.to_positions(positions)
        output = self.backbone.run(self.capabilities.first_layers[num_layers], token_ids, places, masks, rows)
        return cast(Tensor, output.last_hidden_state).to(self.device)

    @torch.no_grad()
    def score_opened(
        self,
        cache: TreeRowsCache,
        token_ids: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        *,
        tree_depths: Tensor | None = None,
        read: Tensor | None = None,
    ) -> Tensor:
        """Logits for a model that drafts. The tokens' slots are open; nothing is committed.

        Args:
            token_ids: [B, W] long.
            depths: [B, W] long; a token stands at position lengths + depth.
            ancestors: [B, W, T] bool, which of the T slots of the tree (`TreeRowsCache.tree_slots`) each token sees,
                itself included. Every token also sees the committed tokens.
            tree_depths: [1 or B, T] long, the depths of the tree's slots; None = `depths`.
            read: [B, R] long, the tokens whose logits are wanted; None = all.

        Returns:
            [B, R or W, V], of the token that follows each.
        """
        output = self._forward_cached(cache, token_ids, depths, ancestors, (), tree_depths)
        scores = output.last if output.logits is None else output.logits
        if read is not None:
            scores = scores.gather(1, read[..., None].expand(-1, -1, scores.shape[-1]))
        return self.compute_logits(scores) if output.logits is None else scores

    def compute_logits(self, hidden: Tensor, lm_head: nn.Module | None = None) -> Tensor:
        """The model's own logits [..., V] of post-norm states [..., D], with its soft-capping and scales; those of
        fewer tokens with an `lm_head` of fewer rows.

        Gradients reach `hidden` only: the LM head is frozen, even if its parameters require gradients.
        """
        if self.capabilities.scale_logits is None:
            raise ValueError(
                f"{type(self._causal_lm).__name__} does more between its last hidden state and its logits than an LM "
                f"head with final_logit_softcapping or a scale, so logits cannot be computed from hidden states"
            )
        head = self.lm_head if lm_head is None else lm_head
        if torch.is_grad_enabled() or not self._has_plain_logits:
            return self.capabilities.scale_logits(run_frozen(head, hidden))
        logits: Tensor = head(hidden)
        return logits.to(hidden.device)

    def lm_head_weight(self) -> Tensor:
        """[V, D] in the target's dtype, however the LM head stores it (see `read_weight`). Do not change it."""
        return read_weight(self.lm_head, (self.vocab_size, self.hidden_size), self.dtype, self.device)

    @property
    def layers_size(self) -> int:
        """Parameters of all decoder layers together, also where only the first are in memory."""
        return round(count_layer_parameters(self._causal_lm) * self.num_layers)

    def final_norm_gain(self) -> Tensor | None:
        """The factor of each channel in the model's final norm ([D], its dtype); None without such a norm."""
        return find_final_norm_gain(self._causal_lm)

    @torch.no_grad()
    def apply_final_norm(self, hidden: Tensor) -> Tensor:
        """The last hidden states [..., D] of the last layer's output [..., D]."""
        norm: Any = find_final_norm(self._causal_lm)
        if norm is None:
            raise ValueError(f"{type(self._causal_lm).__name__} has no norm between its last layer and its LM head")
        return cast(Tensor, norm(hidden))

    def _cut_positions(self, positions: Tensor) -> Tensor:
        """Tokens at `max_length` and later are never emitted, so they may stand anywhere."""
        return positions if self.max_length is None else positions.clamp(max=self.max_length - 1)

    def _forward_cached(
        self,
        cache: KVCache,
        token_ids: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        feature_layers: Sequence[int],
        tree_depths: Tensor | None = None,
        ragged: RaggedRows | None = None,
    ) -> PassOutput:
        """Runs [B, N] tokens, whose slots are open, at positions lengths + depths.

        Each sees the committed tokens and its ancestors [B, N, T] among the tree's slots. These are the open slots, or,
        with `tree_depths` [1 or B, T], the slots at these depths. `ragged` nodes are read, and returned, as one row.
        """
        positions = self._cut_positions(cache.lengths[:, None] + depths)
        tree_positions = positions if tree_depths is None else cache.lengths[:, None] + tree_depths
        masks, places = self.masks.in_view(cache, positions, tree_positions, ancestors), cache.to_positions(positions)
        if ragged is not None:
            ragged.mark(masks)
            cache.pack(ragged.places)
            token_ids, places = ragged.pack(token_ids), ragged.pack(places)
        return self._run(cache, token_ids, places, masks, tree_positions, feature_layers)

    def _run(
        self,
        cache: KVCache,
        token_ids: Tensor,
        positions: Tensor,
        masks: Any,
        tree_positions: Tensor,
        feature_layers: Sequence[int],
    ) -> PassOutput:
        """Runs [B, N] tokens at positions [B, N] or [A, B, N]; `tree_positions` are those of the tree's slots, without
        the cache's offsets."""
        if self._placed is not None:
            if feature_layers:
                self.refuse_features()
            refuse_training(self.model)
            assert cache.source is not None, "an encoder-decoder target reads a source: call read_source first"
            slots_seen, places = cache.slots_seen(None)
            keys = slots_seen.expand(len(positions), -1).scatter(1, places, tree_positions.expand_as(places))
            logits = self._placed.run(cache.source, cache, token_ids, positions, keys, masks)
            return PassOutput(logits[..., :0], None, logits)
        has_own_logits = self.capabilities.scale_logits is None
        return self.backbone.read(
            token_ids, positions, masks, cache, feature_layers=feature_layers, with_logits=has_own_logits
        )

    def refuse_features(self) -> None:
        """Refuses (ValueError) an encoder-decoder target, which has no features."""
        if self._placed is not None:
            raise ValueError(
                f"{type(self._causal_lm).__name__} is an encoder-decoder model, whose hidden states are not handed "
                f"over: draft with a SmallModelDrafter or an NgramDrafter; trained heads need a decoder-only target"
            )
