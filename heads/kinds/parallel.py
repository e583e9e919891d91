"""P-EAGLE (arXiv 2602.01469): EAGLE-3's layer drafts all depths in one pass, with masks for the unknown tokens.

Legend: B batch, T sequence length, S slots of one call, W of them in one pass, K depths, A slots drawn, M mask rows,
D hidden size, F fused features, V target vocabulary, Vd draft vocabulary.

Depth 0 is EAGLE-3's: slot t pairs g_t = fc(features of position t) with the embedding of x_{t+1} and predicts x_{t+2}.
Mask row d of slot t has RoPE position t + d, pairs a learned embedding with fc(learned features) (the same for all
rows), and predicts x_{t+2+d}. It sees the slots up to t and the mask rows 1 to d of slot t.

In training deeper rows are dropped geometrically: a share `keep_ratio`^d of each sequence's slots keeps row d, and with
it the rows before d, which row d sees.

Worked example, 10 slots, K = 3, keep_ratio 0.7: all 10 slots predict x_{t+2}, 7 of them also x_{t+3}, and 5 of these
also x_{t+4}.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from draftsmith.heads.kinds.eagle3 import Eagle3Config, Eagle3Heads
from draftsmith.heads.modules.anchors import draw_slots
from draftsmith.heads.modules.block_view import BlockView
from draftsmith.heads.modules.draft_step import DraftStep
from draftsmith.heads.modules.host_tensors import send
from draftsmith.heads.modules.layers import DraftAttention, DraftCache, last_slot
from draftsmith.heads.modules.vocabulary import mean_embedding
from draftsmith.inference.drafters.base import DraftLogits
from draftsmith.inference.drafters.row_state import RowState
from draftsmith.inference.targets.target import Target


def default_shape(num_layers: int) -> tuple[int, int]:
    """Draft layers and depths: 4 and 8 as in published trainers, 2 and 6 for targets with few layers."""
    return (4, 8) if num_layers >= 24 else (2, 6)


class ParallelConfig(Eagle3Config):
    """The settings of P-EAGLE heads.

    Args:
        num_depths: K, tokens drafted by one pass (from_target: `default_shape`).
        num_layers: EAGLE-3's layer plus the plain decoder layers above it (likewise).
        keep_ratio: the share of one depth's slots that the next depth is trained on (0.7 in published trainers).
        min_keep_ratio: the share of all slots that every depth keeps (0.2 in published trainers).
        mask_token_id: the token whose embedding mask rows have, for heads with an `own_embedding`; None = an embedding
            beside the table.
        **kwargs: arguments of `Eagle3Config`, without `ttt_steps` and `norm_output`.
    """

    model_type = "draftsmith_parallel"
    head_type: ClassVar[str] = "parallel"

    num_depths: int = 6
    num_layers: int = 2
    keep_ratio: float = 0.7
    min_keep_ratio: float = 0.2
    mask_token_id: int | None = None
    ttt_steps: int = 1

    def __post_init__(self, **kwargs: Any) -> None:
        if self.ttt_steps != 1 or self.norm_output:
            raise ValueError(
                "ttt_steps and norm_output belong to heads that draft one depth after another: set num_depths instead"
            )
        self.check_range("num_depths", 2)
        for name, value in (("keep_ratio", self.keep_ratio), ("min_keep_ratio", self.min_keep_ratio)):
            if not 0 < value <= 1:
                raise ValueError(f"{name} is {value}; allowed is a share above 0 and up to 1 (1 drops nothing)")
        super().__post_init__(**kwargs)
        if self.mask_token_id is not None and not self.own_embedding:
            raise ValueError(
                f"mask_token_id is {self.mask_token_id}, a row of embeddings that the heads train: set "
                "own_embedding=true, or leave it out"
            )
        self.check_range("mask_token_id", 0, self.target_vocab_size - 1 if self.target_vocab_size else None)

    @classmethod
    def from_target(cls, target: Target, **overrides: Any) -> Self:
        num_layers, num_depths = default_shape(target.num_layers)
        usual = {"num_layers": num_layers, "num_depths": num_depths, "norm_output": False}
        return super().from_target(target, **{**usual, **overrides})


@dataclass(frozen=True)
class Band:
    """Slots [B, A] (-1: padding) that keep exactly the mask rows 1 to `num_rows`; on the host."""

    slots: Tensor
    num_rows: int

    @property
    def positions(self) -> Tensor:
        """[B, A * num_rows], the positions of the mask rows."""
        rows = torch.arange(1, self.num_rows + 1, device=self.slots.device)
        return (self.slots.clamp(min=0)[..., None] + rows).flatten(1)


def _slots_with_row(bands: Sequence[Band], depth: int) -> Tensor:
    """[B, A], the slots that keep mask row `depth`."""
    return torch.cat([band.slots for band in bands if band.num_rows >= depth], dim=1)


@dataclass
class ParallelState(RowState):
    """The state of one batch.

    Attributes:
        caches: each layer's keys and values of accepted slots, with K - 1 tree rows for the masks.
        hidden: [B, K, D] outputs of all depths after the last accepted slot.
        logits: [B, K, Vd] of these outputs.
    """

    caches: list[DraftCache]
    hidden: Tensor
    logits: Tensor | None = None
    row_fields = ("caches", "hidden")


class ParallelHeads(Eagle3Heads):
    """EAGLE-3's projection, first layer, norm, LM head and draft vocabulary; `expand` only reads."""

    config_class = ParallelConfig

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config)
        if config.mask_token_id is None:
            self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        self.mask_hidden = nn.Parameter(torch.full((self.fc.in_features,), 0.02))  # a norm of zeros would be zero

    @property
    def max_depth(self) -> int:  # type: ignore[override]
        return int(self.config.num_depths)

    @property
    def num_unrolled_steps(self) -> int:
        return self.max_depth

    def init_from_target(self, target: Target) -> None:
        super().init_from_target(target)
        self._mask_row().copy_(mean_embedding(target))

    def _mask_row(self) -> Tensor:
        """[D], the embedding of mask rows: by itself, or a row of the heads' own table."""
        token = self.config.mask_token_id
        return self.mask_embedding if token is None else self.embed_tokens.weight[token]

    def with_masks(self, embedded: Tensor, g: Tensor, num_masks: int) -> tuple[Tensor, Tensor]:
        """Embeddings and g of slots [B, W, D], each followed by M mask rows: [B, W + M, D]."""
        batch = g.shape[0]
        with_embedding, with_hidden = (
            torch.cat([rows, mask.to(rows.dtype).expand(batch, num_masks, -1)], dim=1)
            for rows, mask in ((embedded, self._mask_row()), (g, self.fuse(self.mask_hidden)))
        )
        return with_embedding, with_hidden

    # Training.

    def unroll(self, features: Tensor, input_ids: Tensor) -> list[DraftStep]:
        return self.unroll_where(features, input_ids, torch.ones(input_ids.shape, dtype=torch.long))

    def unroll_where(
        self, features: Tensor, input_ids: Tensor, loss_mask: Tensor, token_seeds: Tensor | None = None
    ) -> list[DraftStep]:
        """All rows in one pass. Without `token_seeds`, as in evaluations, none of them is dropped."""
        batch, length = input_ids.shape
        positions = torch.arange(length, device=input_ids.device).expand(batch, -1)
        bands = self._find_bands(loss_mask, token_seeds)
        ahead = nn.functional.pad(input_ids[:, 1:], (0, 1))
        mask_positions = send(torch.cat([band.positions for band in bands], dim=1), input_ids.device)
        rows = self.with_masks(self.embed(ahead), self.fuse(features), mask_positions.shape[1])

        views = [[self._view(band, length, layer.self_attn.window) for band in bands] for layer in self.draft_layers]

        def attend(number: int, attention: DraftAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            (slot_q, *masks_q), (slot_k, *masks_k), (slot_v, *masks_v) = (
                x.split([length, *(band.slots.shape[1] * band.num_rows for band in bands)], dim=2) for x in (q, k, v)
            )
            attended = [attention.attend_unrolled(slot_q, [slot_k], [slot_v])]
            for view, *own in zip(views[number], masks_q, masks_k, masks_v, strict=True):
                attended.append(attention.output(view.attend(own[0], own[1], own[2], (slot_k, slot_v))))
            return torch.cat(attended, dim=1)

        hidden = self.run_layers(*rows, torch.cat([positions, mask_positions], dim=1), attend)
        first, *parts = hidden.split([length, *(band.slots.shape[1] * band.num_rows for band in bands)], dim=1)
        steps = [DraftStep(2, first, self.score)]
        for depth in range(1, self.max_depth):
            deep = [
                part.unflatten(1, (-1, band.num_rows))[:, :, depth - 1]
                for band, part in zip(bands, parts, strict=True)
                if band.num_rows >= depth
            ]
            slots = _slots_with_row(bands, depth)
            steps.append(DraftStep(2 + depth, torch.cat(deep, dim=1), self.score, slots=slots))
        return steps

    def choose_slots(self, loss_mask: Tensor, token_seeds: Tensor | None = None) -> list[Tensor | None]:
        bands = self._find_bands(loss_mask, token_seeds)
        return [None, *(_slots_with_row(bands, depth) for depth in range(1, self.max_depth))]

    def _find_bands(self, loss_mask: Tensor, token_seeds: Tensor | None) -> list[Band]:
        batch, length = loss_mask.shape
        if token_seeds is None:
            return [Band(torch.arange(length).expand(batch, -1), self.max_depth - 1)]
        return self.choose_bands(draw_slots(loss_mask, length, token_seeds))

    def _view(self, band: Band, length: int, window: int | None) -> BlockView:
        """A mask row is as far ahead of its slot as its depth, and so is its window, as in speculators."""
        seen = torch.ones(band.num_rows, band.num_rows, dtype=torch.bool, device=self.device).tril()
        ahead = torch.arange(1, band.num_rows + 1, device=self.device)
        return BlockView(band.slots.clamp(min=0), seen, length, window, ahead)

    def choose_bands(self, drawn: Tensor) -> list[Band]:
        """Cuts each sequence's slots [B, A], in the order drawn and padded at the end with -1, into bands, the deepest
        first (geometric dropping). Bands without a slot are left out, but not the deepest, which all steps read."""
        counts, places = (drawn >= 0).sum(1, keepdim=True), torch.arange(drawn.shape[1])
        bands, before, deepest = [], torch.zeros_like(counts), self.max_depth - 1
        for num_rows in range(deepest, 0, -1):
            share = max(self.config.keep_ratio**num_rows, self.config.min_keep_ratio)
            kept = (counts.double() * share - 1e-9).ceil().long()
            slots = drawn.masked_fill((places < before) | (places >= kept), -1)
            if (width := int((kept - before).max())) or num_rows == deepest:
                # In order, attention costs less.
                bands.append(Band(slots.sort(dim=1).values[:, -max(width, 1) :], num_rows))
            before = kept
        return bands

    # Decoding.

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> ParallelState:  # type: ignore[override]
        self.require_vocabulary()
        sizes = {"num_slots": max_length, "num_scratch": self.max_depth - 1}
        caches = [layer.self_attn.new_cache(batch_size, **sizes) for layer in self.draft_layers]
        hidden = torch.zeros(batch_size, self.max_depth, self.config.hidden_size, device=self.device, dtype=self.dtype)
        return ParallelState(caches, hidden)

    def extend(  # type: ignore[override]
        self, state: ParallelState, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        assert features is not None
        # In the same pass: the mask rows after each row's last slot.
        (batch, width), num_masks = next_token_ids.shape, self.max_depth - 1
        steps, lengths = torch.arange(width + num_masks, device=counts.device), state.caches[0].lengths[:, None]
        mask_positions = lengths + counts[:, None] + steps[:num_masks]
        seen = torch.ones(num_masks, num_masks, dtype=torch.bool, device=counts.device).tril()

        def attend(number: int, attention: DraftAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache, own = state.caches[number], steps[:num_masks]
            slots = cache.open(width, counts, max_slots)
            masks = cache.open_scratch(own, seen.expand(batch, -1, -1), ahead=1 + own)
            slots.update(k[:, :, :width], v[:, :, :width])
            keys, values = masks.update(k[:, :, width:], v[:, :, width:])
            return attention.attend(q, keys, values, torch.cat([slots.mask, masks.mask], dim=2))

        rows = self.with_masks(self.embed(next_token_ids), self.fuse(features), num_masks)
        hidden = self.run_layers(*rows, torch.cat([lengths + steps[:width], mask_positions], dim=1), attend)
        drafted = torch.cat([last_slot(hidden, counts), hidden[:, width:]], dim=1)
        state.hidden.copy_(torch.where((counts > 0)[:, None, None], drafted, state.hidden))
        state.logits = self.score(state.hidden)
        return self.expand(state, next_token_ids, counts, 0)

    def expand(  # type: ignore[override]
        self, state: ParallelState, token_ids: Tensor, parents: Tensor, depth: int
    ) -> DraftLogits:
        assert state.logits is not None
        return DraftLogits(state.logits[:, depth : depth + 1], self.draft_token_ids)
