"""Multi-token prediction: DeepSeek-V3's MTP modules (arXiv 2412.19437, section 2.2), and FastMTP's one module applied
at every depth (arXiv 2509.18362, section 3).

    h^k_t = block(proj([norm(emb(x_{t+k})); norm(h^{k-1}_t)])),  P(x_{t+k+1}) = softmax(LM head(norm(h^k_t)))

with h^0 the target's post-norm state and k = 1..K (V3, equations 21 to 23). Embedding and LM head are the target's own,
frozen; each block has a final norm.

Legend: B batch, T sequence length, S slots of one call, W frontier nodes, Q rows of a pass, D hidden size, R tree
rows, n blocks (1, or K when depths have their own), V target vocabulary. The code counts depths from 0, as
in the other kinds: depth d = k - 1 of slot t reads (h^d_t, x_{t+d+1}), predicts x_{t+d+2} and has RoPE position t + d.

One shared block, applied K times. There is one KV cache, and its slot t holds the row (target's state of t, x_{t+1}). A
drafted token's row, made from the drafter's own state, sees the accepted slots and its ancestors' rows. Training uses
the mask of the training-time test: depth d of slot t sees depth 0 of the slots j <= t, and depths 1..d of its own slot.

A block for each depth. Depth d has its own KV cache, and its rows see only rows of depth d, at all slots j <= t (V3's
causal mask). Assign the row of depth d at slot j to the token it reads, x_{j+d+1}. Then the rows of the token at
position p, of depth d at slot p - d - 1, need only that token and the row of depth d - 1 of the token before:

    token      x_1      x_2      x_3      x_4        column = p - 1 = t + d, in every depth's cache
    depth 0   (0, 0)   (0, 1)   (0, 2)   (0, 3)      (depth, slot)
    depth 1      -     (1, 0)   (1, 1)   (1, 2)      each reads the state of the entry above and to the left
    depth 2      -        -     (2, 0)   (2, 1)

So `extend` adds one column per accepted token, and `expand` one column per frontier node: for a node at level d of the
tree, the depths d..K-1. (Lower depths would need the target's state of a drafted token, and nothing reads them.) Depth
d is scored; later levels attend to the deeper ones: x_{t+2} also enters depth 2 at slot t - 1, and a node at level 2
sees that row. With columns as slots, all caches have one length, one set of tree rows and one ancestor mask. The
cache of depth d has no columns below d."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.heads.base import DraftHeads
from draftsmith.heads.config import WindowedConfig
from draftsmith.heads.formats.native_mtp import find_state_gain, read_native_modules
from draftsmith.heads.formats.published import HUB_KEYS
from draftsmith.heads.importing import build_heads
from draftsmith.heads.modules.draft_step import DraftStep
from draftsmith.heads.modules.layers import DecoderLayer, DraftAttention, DraftCache, RMSNorm, Rows, last_slot
from draftsmith.heads.modules.stock_layer import StockLayer
from draftsmith.inference.drafters.base import DraftLogits
from draftsmith.inference.drafters.row_state import RowState, TreeRows
from draftsmith.inference.targets.target import Target

FLOAT32_BUFFERS = {"e_score_correction_bias"}  # DeepSeek's routers keep it in float32


class MTPConfig(WindowedConfig):
    """The settings of MTP heads.

    Args:
        num_steps: K, the drafted tokens that are trained (FastMTP trains 3, DeepSeek-V3 trains 1).
        share_block: True: one block for all depths, which decoding may apply more often than training did (FastMTP,
            section 3.1). False: a block and a KV cache for each of the K depths (DeepSeek-V3, section 2.2).
        norm_output: True: the next depth reads the state after the block's final norm, as DeepSeek's published modules
            do and as depth 0 reads the target's. False: it reads the state before that norm.
        hidden_first: the projection reads [state, embedding] (V3's equation 21, MiMo) instead of [embedding, state]
            (DeepSeek's, GLM's and Qwen's published modules).
        zero_first_embedding: the embedding at position 0 is zero, as in serving engines for DeepSeek's modules.
        reads_before_final_norm: depth 0 reads the target's state before its final norm (MiMo).
        stock_layer: the `to_dict()` of a config whose family's own decoder layer is in the blocks, as
            `draftsmith.heads.formats.native_mtp` writes it; None = a layer like Llama's.
        **kwargs: arguments of `WindowedConfig`.
    """

    model_type = "draftsmith_mtp"
    head_type: ClassVar[str] = "mtp"
    reads_one_layer = True

    num_steps: int = 4
    share_block: bool = True
    norm_output: bool = True
    hidden_first: bool = False
    zero_first_embedding: bool = False
    reads_before_final_norm: bool = False
    stock_layer: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.check_range("num_steps", 1)
        super().__post_init__(**kwargs)
        if self.sliding_window is not None and (not self.share_block or self.stock_layer or self.layer_types):
            raise ValueError(
                f"sliding_window is {self.sliding_window}; a window is for one shared block like Llama's: set "
                "share_block to true, and leave stock_layer and layer_types out"
            )


class MTPBlock(nn.Module):
    """An MTP block. Tensor names are those of DeepSeek-V3's checkpoints, with `norm` for `shared_head.norm`."""

    def __init__(self, config: MTPConfig, index: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(size, eps)
        self.hnorm = RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer: DecoderLayer | StockLayer = (
            DecoderLayer(config, size, DraftAttention(config, size, size, window=config.window(index)))
            if config.stock_layer is None
            else StockLayer(config.stock_layer, index)
        )
        self.norm = RMSNorm(size, eps)
        self.is_hidden_first: bool = config.hidden_first
        self.norms_output: bool = config.norm_output

    def join(self, state: Tensor, embedded: Tensor) -> Tensor:
        """The decoder layer's input: states and embeddings [B, Q, D] -> [B, Q, D]."""
        inputs = [self.enorm(embedded), self.hnorm(state)]
        return cast(Tensor, self.eh_proj(torch.cat(inputs[::-1] if self.is_hidden_first else inputs, dim=-1)))

    def next_state(self, hidden: Tensor) -> Tensor:
        """The layer's output in the form that the next depth reads."""
        return cast(Tensor, self.norm(hidden)) if self.norms_output else hidden

    def scored(self, state: Tensor) -> Tensor:
        """`next_state` in the form that the LM head reads."""
        return state if self.norms_output else cast(Tensor, self.norm(state))


@dataclass
class MTPState(RowState):
    """The state of one batch.

    Attributes:
        caches: one per block, all of one length.
        states: [B, 1 + R, n, D], each block's output for the last accepted token (row 0) and for each tree row.
        trail: [B, slots, n - 1, D], for every accepted token, the states that the next blocks read at the token after
            it, because a copied row may end there. None for a shared block, which does not read them.
        tree: who sees whom among the tree rows.
    """

    caches: list[DraftCache]
    states: Tensor
    trail: Tensor | None
    tree: TreeRows
    row_fields = ("caches", "states", "tree")
    slot_fields = ("trail",)

    def copy_rows(self, source: MTPState, rows: Tensor, lengths: Tensor, max_slots: int) -> None:
        super().copy_rows(source, rows, lengths, max_slots)
        if self.trail is not None:
            self.states[:, :1, :-1] = last_slot(self.trail, self.caches[0].lengths)


class MTPHeads(DraftHeads):
    """One MTP block that drafts any number of tokens, or one for each of K."""

    supports_gradient_checkpointing = True
    config_class = MTPConfig
    has_static_state = True
    borrows_lm_head = True
    default_loss = "distillation"
    # FastMTP, section 3.2: beta 0.6. (FastMTP divides by the sum of all weights, which only scales the learning rate.)
    default_step_decay = 0.6
    _keep_in_fp32_modules_strict = FLOAT32_BUFFERS

    def __init__(self, config: MTPConfig) -> None:
        super().__init__(config)
        num_blocks = 1 if config.share_block else config.num_steps
        self.blocks = nn.ModuleList(MTPBlock(config, index) for index in range(num_blocks))
        if config.reads_before_final_norm:
            self.register_buffer("state_gain", torch.ones(config.hidden_size))
        self.post_init()

    @classmethod
    def from_target_checkpoint(
        cls, path_or_hub_id: str | os.PathLike[str], target: Target | PreTrainedModel, **overrides: Any
    ) -> MTPHeads:
        """The MTP modules in a target's own checkpoint, bound to the target and in its dtype.

        Args:
            path_or_hub_id: the target's checkpoint in safetensors.
            **overrides: keys of `MTPConfig` (for example `zero_first_embedding=False`), and keywords of a download
                (`revision`, `subfolder`, `token`, ...).

        Raises:
            ValueError: there is no MTP module, or one that cannot be used, with the reason.
        """
        path = str(path_or_hub_id)
        target = Target.of(target)
        hub = {key: overrides.pop(key) for key in HUB_KEYS if key in overrides}
        native = read_native_modules(path, target, **hub)
        fixed = {"share_block", "stock_layer", "reads_before_final_norm"}
        fixed |= set() if native.settings["share_block"] else {"num_steps"}
        if refused := sorted(fixed & overrides.keys()):
            raise ValueError(f"{', '.join(refused)} cannot be set: the MTP modules of {path} decide; leave it out")
        imported = replace(native, settings=native.settings | overrides)
        return cast(MTPHeads, build_heads(imported, target, path, dtype=target.dtype))

    @property
    def each_block(self) -> list[MTPBlock]:
        return cast(list[MTPBlock], list(self.blocks))

    @property
    def max_depth(self) -> int | None:  # type: ignore[override]
        return None if self.config.share_block else int(self.config.num_steps)

    def init_from_target(self, target: Target) -> None:
        """The LM head expects states of the final norm's scale, so the norm starts from the target's. The projection
        starts by passing the state on, which learns faster than a random projection."""
        gain, size = target.final_norm_gain(), target.hidden_size
        for block in self.each_block:
            if gain is not None:
                block.norm.weight.copy_(gain)
            state_begin = 0 if block.is_hidden_first else size
            embedding = block.eh_proj.weight[:, size - state_begin : 2 * size - state_begin]
            embedding.mul_(0.5)
            block.eh_proj.weight[:, state_begin : state_begin + size] = torch.eye(size, device=embedding.device)
        if self.config.reads_before_final_norm:
            cast(Tensor, self.state_gain).copy_(find_state_gain(target))

    def first_state(self, features: Tensor) -> Tensor:
        """The state that depth 0 reads. `hnorm` ignores the length of its input, so dividing by the gain of the
        target's final norm undoes that norm."""
        state = features.to(self.compute_dtype)
        return state / cast(Tensor, self.state_gain) if self.config.reads_before_final_norm else state

    def score(self, block: MTPBlock, state: Tensor) -> Tensor:
        """Outputs of `block` [..., D] -> the target's logits [..., V]."""
        return self.score_as_target(block.scored(state))

    def embed_at(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        embedded = self.embed(token_ids)
        if self.config.zero_first_embedding:
            embedded = embedded.masked_fill((positions == 0)[..., None], 0.0)
        return embedded

    # Training.

    @property
    def num_unrolled_steps(self) -> int:
        return int(self.config.num_steps)

    def unroll(self, features: Tensor, input_ids: Tensor) -> list[DraftStep]:
        """The K depths; depth d reads the data's tokens shifted left by d + 1."""
        batch, length = input_ids.shape
        state = self.first_state(features)
        slots = torch.arange(length, device=input_ids.device).expand(batch, -1)
        steps: list[DraftStep] = []
        past: list[tuple[Tensor, Tensor]] = []
        for depth in range(self.config.num_steps):
            block = self.each_block[0 if self.config.share_block else depth]
            tokens = nn.functional.pad(input_ids[:, depth + 1 :], (0, min(depth + 1, length)))[:, :length]
            x = block.join(state, self.embed_at(tokens, slots + depth))
            hidden = block.layer.unroll(x, slots + depth, past if self.config.share_block else [])
            state = block.next_state(hidden)
            steps.append(DraftStep(2 + depth, state, partial(self.score, block)))
        return steps

    # Decoding.

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> MTPState:
        caches = [
            block.layer.new_cache(batch_size, num_slots=max_length, num_scratch=num_scratch)
            for block in self.each_block
        ]
        zeros = partial(torch.zeros, device=self.device, dtype=self.dtype)
        size, count = self.config.hidden_size, len(caches)
        states = zeros(batch_size, 1 + num_scratch, count, size)
        # The last slot takes padding.
        trail = zeros(batch_size, max_length + 1, count - 1, size) if count > 1 else None
        return MTPState(caches, states, trail, TreeRows(batch_size, num_scratch, self.device))

    def extend(
        self, state: MTPState, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        assert features is not None
        last_B1nD = state.states[:, :1]
        previous = self.first_state(features)
        width = previous.shape[1]
        positions = state.caches[0].lengths[:, None] + torch.arange(width, device=previous.device)
        embedded = self.embed_at(next_token_ids, positions)
        outputs: list[Tensor] = []  # of all blocks but the last, at all slots
        newest: list[Tensor] = []  # of all blocks, at the newest slot
        for depth, (block, cache) in enumerate(zip(self.each_block, state.caches, strict=True)):
            is_last = depth == len(state.caches) - 1
            rows = cache.open(width, counts, max_slots, reads_last=is_last)
            rows = _without_first(rows, depth) if depth else rows
            output = block.next_state(block.layer.decode(block.join(previous, embedded), positions, rows))
            newest.append(output if is_last else last_slot(output, counts))
            if is_last:
                break
            outputs.append(output)
            # At each token the next depth reads this block's output at the token before.
            previous = torch.cat([last_B1nD[:, :, depth], output[:, :-1]], dim=1)
        if state.trail is not None:
            every_row = torch.arange(len(rows.columns), device=rows.columns.device)[:, None]
            state.trail[every_row, rows.columns - state.caches[0].num_scratch] = torch.stack(outputs, dim=2)
        last_B1nD = torch.where(counts[:, None, None, None] > 0, torch.stack(newest, dim=2), last_B1nD)
        state.states.narrow(1, 0, 1).copy_(last_B1nD)
        state.tree.forget_levels()
        return DraftLogits(self.score(self.each_block[0], last_B1nD[:, :, 0]), self.draft_token_ids)

    def expand(self, state: MTPState, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        level = state.tree.open_level(parents)
        parent_states = level.parents_of(state.states)
        # The last accepted column is lengths - 1, and level d of the tree is d columns after it.
        positions = (state.caches[0].lengths[:, None] + level.depth).expand_as(token_ids)
        embedded = self.embed_at(token_ids, positions)
        outputs = []
        begin = 0 if self.config.share_block else depth
        for index in range(begin, len(state.caches)):
            block, cache = self.each_block[index], state.caches[index]
            seen = level.ancestors
            if index:
                seen = seen & ((cache.lengths[:, None] + state.tree.depths >= index)[:, None] | level.itself)
            rows = cache.open_scratch(level.own, seen)
            rows = _without_first(rows, index) if index else rows
            x = block.join(parent_states[:, :, max(index - 1, 0)], embedded)
            outputs.append(block.next_state(block.layer.decode(x, positions, rows)))
        state.states.narrow(2, begin, len(outputs)).index_copy_(1, level.places, torch.stack(outputs, dim=2))
        return DraftLogits(self.score(self.each_block[begin], outputs[0]), self.draft_token_ids)


def _without_first(rows: Rows, depth: int) -> Rows:
    """Hides the first `depth` columns, which a block of this depth does not have. Each of them still sees itself:
    attention over nothing is NaN."""
    seen, first = torch.arange(rows.mask.shape[-1], device=rows.mask.device), rows.cache.num_scratch
    is_missing = (seen >= first) & (seen < first + depth)
    mask = rows.mask & (~is_missing | (seen == rows.columns[..., None])[..., None, :, :])
    return Rows(rows.cache, rows.columns, mask, rows.counts)
