"""Block drafters: a whole block of tokens from one pass of a few draft layers.

These are DFlash (arXiv 2602.06036) and, by options of `BlockConfig`, DSpark (2607.05147), JetSpec (2606.18394) and
path-conditioned trees (PCTree, 2608.02123).

Legend: B batch, T sequence length, A anchors of a sequence, N block size, K depths, S slots of one call, D hidden size,
F fused features, R rank of the Markov bias, W frontier nodes, V target vocabulary.

Slot t pairs the features of position t with x_{t+1}, the anchor of a block: an accepted token whose features are not
known yet. The block is [x_{t+1}, MASK, ...] at RoPE positions t + 1, t + 2, ... Its N queries see keys and values of
the fused features of positions 0 to t, and their own block. Row k predicts x_{t+1+k} (DFlash: rows 1 to N - 1, so K = N
- 1), or x_{t+2+k} (DSpark's anchor prediction: all rows, so K = N).

Worked example, N = 4 after slot 5: the block has positions 6 to 9 and sees features 0 to 5. DFlash predicts x_7, x_8
and x_9; with anchor prediction also x_10."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.heads.base import DraftHeads
from draftsmith.heads.config import WindowedConfig
from draftsmith.heads.modules.anchors import draw_slots
from draftsmith.heads.modules.block_layer import BlockAttention, BlockLayer, MarkovBias
from draftsmith.heads.modules.block_view import BlockView
from draftsmith.heads.modules.draft_step import DraftStep
from draftsmith.heads.modules.host_tensors import send
from draftsmith.heads.modules.layers import DraftCache, RMSNorm, last_slot
from draftsmith.heads.modules.vocabulary import mean_embedding, principal_embeddings, seldom_token
from draftsmith.inference.drafters.base import DraftLogits
from draftsmith.inference.drafters.row_state import RowState
from draftsmith.inference.targets.target import Target


def spaced_feature_layers(num_layers: int) -> list[int]:
    """Five tapped layers: evenly spaced from the second layer to the third-last one, as in DFlash's code; fewer where
    these collide.

    >>> spaced_feature_layers(36), spaced_feature_layers(16), spaced_feature_layers(6)
    ([2, 10, 18, 26, 34], [2, 5, 8, 11, 14], [2, 3, 4])
    """
    low = min(2, num_layers)
    high = max(num_layers - 2, low)
    count = min(5, high - low + 1)
    return [low] if count == 1 else [low + (2 * i * (high - low) + count - 1) // (2 * count - 2) for i in range(count)]


def default_shape(num_layers: int) -> tuple[int, int]:
    """Draft layers and block size: DFlash's 5 and 16 for the 36 layers of Qwen3-8B, fewer for targets with few layers.

    >>> default_shape(36), default_shape(28), default_shape(16)
    ((5, 16), (4, 16), (2, 8))
    """
    return min(5, max(2, round(num_layers / 7))), 16 if num_layers >= 24 else 8


class BlockConfig(WindowedConfig):
    """The settings of block drafters.

    Args:
        block_size: N, tokens of a block, its anchor included (from_target: `default_shape`).
        num_layers: draft layers (likewise).
        num_anchors: blocks trained per sequence, drawn at random where there is a loss (DFlash: 256 to 512). In
            evaluations the draw is always the same.
        predicts_at_anchor: the anchor's row predicts the token after the anchor, and every row the token after its own
            (DSpark).
        markov_rank: R, of the bias W2 W1[x_{k-1}] that the previous token adds to the logits (DSpark: 256); 0 = none.
            In trees every node has its own previous token (PCTree).
        has_confidence: train a head for the chance that a depth's token is accepted if all tokens before it are
            (DSpark). In a tree every node has its own confidence.
        confidence_threshold: needs `has_confidence`. Leaves out nodes below the root's children whose chance of being
            accepted (the product of the confidences along the path) is smaller than this (DSpark). None = off, the
            default: trees have fixed shapes, so leaving a node out saves no time, but a dynamic tree fills the place.
            You may change it between texts: `from_pretrained(path, confidence_threshold=0.1)`, or in `heads.config`.
        is_causal: a block's rows see only the rows before them (JetSpec).
        sliding_is_causal: the same in layers with a sliding window only (DFlash by speculators, where nothing else is
            said).
        mask_token_id: the token whose embedding MASK has (from_target: `seldom_token`), as in DFlash: engines look it
            up in the target. None: MASK has an embedding of its own, which is trained.
        **kwargs: arguments of `WindowedConfig`.
    """

    model_type = "draftsmith_block"
    head_type: ClassVar[str] = "block"

    block_size: int = 8
    num_layers: int = 2
    num_anchors: int = 256
    predicts_at_anchor: bool = False
    markov_rank: int = 0
    has_confidence: bool = False
    confidence_threshold: float | None = None
    is_causal: bool = False
    sliding_is_causal: bool = False
    mask_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.check_range("block_size", 1 if self.predicts_at_anchor else 2)
        self.check_range("num_layers", 1)
        self.check_range("num_anchors", 1)
        self.check_range("markov_rank", 0)
        super().__post_init__(**kwargs)
        self.check_range("mask_token_id", 0, self.target_vocab_size - 1 if self.target_vocab_size else None)
        if self.target_num_layers and not self.feature_layers:
            raise ValueError("feature_layers is empty; block drafters read at least one layer (DFlash: five)")
        self.check_settings()

    def check_settings(self) -> None:
        """Checks the settings that may be changed between texts."""
        self.check_range("confidence_threshold", 0, 1)
        if self.confidence_threshold is not None and not self.has_confidence:
            raise ValueError(
                f"confidence_threshold is {self.confidence_threshold}, but these heads have no confidence head: leave "
                "it out, or train heads with has_confidence"
            )

    @property
    def num_depths(self) -> int:
        return self.block_size if self.predicts_at_anchor else self.block_size - 1

    @classmethod
    def from_target(cls, target: Target, **overrides: Any) -> Self:
        num_layers, block_size = default_shape(target.num_layers)
        usual = {
            "feature_layers": spaced_feature_layers(target.num_layers),
            "num_layers": num_layers,
            "block_size": block_size,
            "mask_token_id": seldom_token(target),
        }
        return super().from_target(target, **{**usual, **overrides})


@dataclass
class BlockState(RowState):
    """The state of one batch.

    Attributes:
        caches: each draft layer's keys and values of the fused features, with N tree rows for the block.
        chances: [B, room for a frontier] float32; its first W entries are the chances that a child of each node of the
            last frontier is accepted.
        threshold: the config's value at the start of the text.
        hidden: [B, K, D] normed states of all depths after the last accepted slot.
        logits: [B, K, V] of these states, without the Markov bias.
    """

    caches: list[DraftCache]
    chances: Tensor
    threshold: float | None
    hidden: Tensor | None = None
    logits: Tensor | None = None
    row_fields = ("caches", "chances")
    begins_with: ClassVar[dict[str, float]] = {"chances": 1.0}


class BlockHeads(DraftHeads):
    """All depths from one pass: `extend` computes them, `expand` reads one and adds the bias of each parent's token."""

    supports_gradient_checkpointing = True
    config_class = BlockConfig
    layer_class: ClassVar[type[BlockLayer]] = BlockLayer
    has_static_state = True
    borrows_lm_head = True
    default_loss = "cross_entropy"
    default_depth_weights = "d_pace"

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.fc = nn.Linear(len(config.feature_layers) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        if config.mask_token_id is None:
            self.mask_embedding = nn.Parameter(torch.zeros(size))
        else:
            self.register_buffer("mask_embedding", torch.zeros(size))
        self.layers = nn.ModuleList(self.layer_class(config, config.window(n)) for n in range(config.num_layers))
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.markov = MarkovBias(config.target_vocab_size, config.markov_rank) if config.markov_rank else None
        self.confidence = nn.Linear(size + config.markov_rank, 1) if config.has_confidence else None
        if self.confidence is not None:
            nn.init.zeros_(self.confidence.bias)
        self.post_init()

    @property
    def each_layer(self) -> list[BlockLayer]:
        return cast(list[BlockLayer], list(self.layers))

    @property
    def max_depth(self) -> int:  # type: ignore[override]
        return int(self.config.num_depths)

    @property
    def default_step_decay(self) -> float:  # type: ignore[override]
        """The factor from one step to the next of the weights exp(-(k - 1) / gamma); gamma is half the block, but 7 for
        the 16 tokens of DFlash."""
        size = self.config.block_size
        return math.exp(-1 / (7 if size == 16 else size / 2))

    @torch.no_grad()
    def bind(self, target: Target | PreTrainedModel) -> Self:
        """Reads the mask's embedding again, also for views that share the weights: the target may be in another dtype
        than in training, and engines read the mask from the target that they run."""
        super().bind(target)
        if (token := self.config.mask_token_id) is not None:
            row = self.target.embed_tokens(torch.tensor([token], device=self.target.device))[0]
            self.mask_embedding.copy_(row)
        return self

    def init_from_target(self, target: Target) -> None:
        """The LM head expects states of the final norm's scale, so the norm starts from the target's. MASK and the
        Markov bias start from the target's embeddings; from random numbers the bias learns far less in a few million
        tokens."""
        if (gain := target.final_norm_gain()) is not None:
            self.norm.weight.copy_(gain)
        if self.config.mask_token_id is None:
            self.mask_embedding.copy_(mean_embedding(target))
        if self.markov is not None:
            known = principal_embeddings(target, self.config.markov_rank)
            self.markov.embedding.weight[:, : known.shape[1]] = known

    # Used by training and decoding.

    def fuse(self, features: Tensor) -> Tensor:
        """[B, S, F] -> [B, S, D]."""
        return cast(Tensor, self.hidden_norm(self.fc(features.to(self.compute_dtype))))

    def embed_blocks(self, anchors: Tensor) -> Tensor:
        """Anchor tokens [B, A] -> their blocks' inputs [B, A * N, D]."""
        embedded = self.embed(anchors)[:, :, None]
        masks = self.mask_embedding.to(embedded.dtype).expand(*anchors.shape, self.config.block_size - 1, -1)
        return torch.cat([embedded, masks], dim=2).flatten(1, 2)

    def mask_of_block(self, window: int | None) -> Tensor:
        """[N, N] bool, which rows of its block each row sees, in layers with this window."""
        seen = torch.ones(self.config.block_size, self.config.block_size, dtype=torch.bool, device=self.device)
        is_causal = self.config.is_causal or (self.config.sliding_is_causal and window is not None)
        return seen.tril() if is_causal else seen

    def join(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Normed states [B, A or 1, D] and, if there is a Markov bias, W1 of the previous tokens [B, A]: together
        [B, A, D + R]."""
        if self.markov is None:
            return hidden
        bias = self.markov.embedding(before)
        return torch.cat([hidden.expand(-1, bias.shape[1], -1), bias], dim=-1)

    def score(self, state: Tensor) -> Tensor:
        """The result of `join` [..., D + R] -> logits [..., V]."""
        if self.markov is None:
            return self.score_as_target(state)
        hidden, before = state.split([self.config.hidden_size, self.config.markov_rank], dim=-1)
        return self.score_as_target(hidden) + cast(Tensor, self.markov.lm_head(before))

    # Training.

    def unroll(self, features: Tensor, input_ids: Tensor) -> list[DraftStep]:
        return self.unroll_where(features, input_ids, torch.ones(input_ids.shape, dtype=torch.long))

    def choose_slots(self, loss_mask: Tensor, token_seeds: Tensor | None = None) -> list[Tensor | None]:
        slots = draw_slots(loss_mask, self.config.num_anchors, token_seeds)
        return [slots.sort(dim=1).values] * self.max_depth  # in order, attention costs less

    def unroll_where(
        self, features: Tensor, input_ids: Tensor, loss_mask: Tensor, token_seeds: Tensor | None = None
    ) -> list[DraftStep]:
        """Blocks after the drawn slots of every sequence."""
        (batch, length), size = input_ids.shape, self.config.block_size
        positions = torch.arange(length, device=input_ids.device).expand(batch, -1)
        slots = self.choose_slots(loss_mask, token_seeds)[0]
        assert slots is not None
        blocks = slots.clamp(min=0)
        real = send(blocks, input_ids.device)
        context = self.fuse(features)
        hidden = self.embed_blocks(_gather_clamped(input_ids, real + 1))
        rows = torch.arange(size, device=input_ids.device)
        block_positions = (real[..., None] + 1 + rows).flatten(1)
        windows = {layer.self_attn.window for layer in self.each_layer}
        views = {window: BlockView(blocks, self.mask_of_block(window), length, window) for window in windows}
        for layer in self.each_layer:
            keys_values = layer.self_attn.project_context(context, positions)
            attend = partial(_attend_in_training, layer.self_attn, views[layer.self_attn.window], keys_values)
            hidden = layer.run(hidden, block_positions, attend)
        hidden = self.norm(hidden).unflatten(1, (-1, size))[:, :, size - self.max_depth :]
        steps = []
        for k in range(self.max_depth):
            state = self.join(hidden[:, :, k], _gather_clamped(input_ids, real + 1 + k))
            confidence = None if self.confidence is None else self.confidence(state)[..., 0]
            steps.append(DraftStep(2 + k, state, self.score, slots=slots, confidence=confidence))
        return steps

    # Decoding.

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> BlockState:
        self.config.check_settings()
        sizes = {"num_slots": max_length, "num_scratch": self.config.block_size}
        caches = [layer.self_attn.new_cache(batch_size, **sizes) for layer in self.each_layer]
        chances = torch.ones(batch_size, max(1, num_scratch), device=self.device)
        return BlockState(caches, chances, self.config.confidence_threshold)

    def restart(self, state: BlockState, num_rows: int) -> None:
        super().restart(state, num_rows)
        state.threshold = self.config.confidence_threshold

    def extend(
        self, state: BlockState, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        assert features is not None
        context = self.fuse(features)
        positions = state.caches[0].lengths[:, None] + torch.arange(context.shape[1], device=context.device)
        for layer, cache in zip(self.each_layer, state.caches, strict=True):
            rows = cache.open(context.shape[1], counts, max_slots)
            rows.update(*layer.self_attn.project_context(context, positions))
        anchors = last_slot(next_token_ids, counts)
        hidden = self.embed_blocks(anchors)
        size = self.config.block_size
        positions = state.caches[0].lengths[:, None] + torch.arange(size, device=hidden.device)
        for layer, cache in zip(self.each_layer, state.caches, strict=True):
            mask = self.mask_of_block(layer.self_attn.window).expand(hidden.shape[0], -1, -1)
            rows = cache.open_scratch(cache.columns[:size], mask)
            hidden = layer.run(hidden, positions, partial(layer.self_attn.decode, rows=rows))
        state.hidden = self.norm(hidden[:, size - self.max_depth :])
        state.logits = self.score_as_target(state.hidden)
        return self.expand(state, anchors, torch.zeros_like(anchors), 0)

    def expand(self, state: BlockState, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        assert state.logits is not None
        logits = state.logits[:, depth : depth + 1]
        if self.markov is not None:
            logits = logits + self.markov.lm_head(self.markov.embedding(token_ids))
        if self.confidence is None or state.threshold is None:
            return DraftLogits(logits, self.draft_token_ids)
        assert state.hidden is not None
        confidence = self.confidence(self.join(state.hidden[:, depth : depth + 1], token_ids))[..., 0]
        confidence = confidence.float().sigmoid()  # [B, W]; without a Markov bias [B, 1], as the logits
        chances = confidence if depth == 0 else confidence * state.chances.gather(1, parents)
        state.chances.narrow(1, 0, token_ids.shape[1]).copy_(chances)
        if depth:
            is_doubtful = chances[:, : logits.shape[1]] < state.threshold
            logits = logits.masked_fill(is_doubtful[..., None], float("-inf"))
        return DraftLogits(logits, self.draft_token_ids)


def _attend_in_training(
    attention: BlockAttention, view: BlockView, context: tuple[Tensor, Tensor], q: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    return attention.output(view.attend(q, keys, values, context))


def _gather_clamped(token_ids: Tensor, places: Tensor) -> Tensor:
    return token_ids.gather(1, places.clamp(max=token_ids.shape[1] - 1))
