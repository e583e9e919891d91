"""Kangaroo (arXiv 2404.18911): the target's first layers, one trained adapter layer, the target's own LM head.

Legend: B batch, T sequence length, S slots of one call, W frontier nodes, D hidden size, R tree rows: the root and
all frontier nodes of a tree, V target vocabulary.

With l the exit layer, the draft distribution of the token after position t is softmax(LM head(norm(A(hs[l])_t))), where
A adds one causal attention over the target's states hs[l] of positions 0 to t (section 3.1). Drafted tokens pass
through the target's own first l layers and attend to the keys and values in the target's cache. So the adapter reads
the same states of drafted and of accepted tokens, and one training step serves every depth. Feature t is hs[l] of
position t; the root's is computed when drafting begins, since the target has not read the root yet.

A draft of depth d costs d passes through l layers, the adapter and the whole LM head. Verification runs all layers over
the drafted tokens, the first l included. The paper hands the states of the first l layers on instead. That reads the
same weights as often: the last drafted tokens have not been through these layers, so they need one more pass there
(d * l + L layers in all, either way). It would save arithmetic, at most l/L of what verifying all nodes costs above
verifying one, and l layers in a step whose chosen tree happens to have no node of the last level.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from draftsmith.heads.base import DraftHeads
from draftsmith.heads.config import DecoderConfig
from draftsmith.heads.modules.draft_step import DraftStep
from draftsmith.heads.modules.layers import DecoderLayer, DraftCache, RMSNorm, last_slot
from draftsmith.inference.cache.kv_cache import KVCache
from draftsmith.inference.cache.shared_rows import SharedRows
from draftsmith.inference.drafters.base import DraftLogits
from draftsmith.inference.drafters.row_state import Level, RowState, TreeRows
from draftsmith.inference.targets.target import Target


def default_exit_layer(num_layers: int) -> int:
    """One layer in sixteen, as the paper's 2 of 32 (Vicuna-7B) and 3 of 40 (13B; section 4), rounded up. Targets with
    few layers need a larger share.

    >>> default_exit_layer(32), default_exit_layer(40), default_exit_layer(6), default_exit_layer(2)
    (2, 3, 1, 1)
    """
    return -(-num_layers // 16)


class KangarooConfig(DecoderConfig):
    """The settings of Kangaroo heads.

    Args:
        exit_layer: the number of the target's layers that drafting runs: at least 1, and fewer than all (from_target:
            `default_exit_layer`).
        confidence_threshold: the second exit (section 3.2). A token gets no children if it was drawn from a
            distribution whose best token has a smaller chance than this, at temperature 1 (the paper uses 0.6). None =
            off, the default: trees have fixed shapes, so leaving a node out saves no time. You may change it between
            texts: `from_pretrained(path, confidence_threshold=0.6)`, or in `heads.config`.
        **kwargs: arguments of `DecoderConfig`.
    """

    model_type = "draftsmith_kangaroo"
    head_type: ClassVar[str] = "kangaroo"

    exit_layer: int = 1
    confidence_threshold: float | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.target_num_layers == 1:
            raise ValueError("this target has 1 layer; Kangaroo exits before the last layer, so it needs 2 or more")
        self.check_range("exit_layer", 1, self.target_num_layers - 1 if self.target_num_layers else None)
        self.feature_layers = self.feature_layers or [self.exit_layer]
        super().__post_init__(**kwargs)
        self.check_settings()

    def check_settings(self) -> None:
        """Checks the settings that may be changed between texts."""
        if self.feature_layers != [self.exit_layer]:
            raise ValueError(
                f"feature_layers is {self.feature_layers} and exit_layer {self.exit_layer}; Kangaroo reads the "
                "exit layer's state only: set exit_layer when heads are created, and leave feature_layers out"
            )
        self.check_range("confidence_threshold", 0, 1)

    @classmethod
    def from_target(cls, target: Target, **overrides: Any) -> Self:
        return super().from_target(target, **{"exit_layer": default_exit_layer(target.num_layers), **overrides})


class KangarooAdapter(DecoderLayer):
    """A decoder layer without an MLP (section 3.1: one multi-head attention and two norms). `KangarooHeads` has the
    norm before the LM head."""

    def __init__(self, config: KangarooConfig) -> None:
        super().__init__(config, config.target_hidden_size)
        del self.post_attention_layernorm, self.mlp

    def _add_mlp(self, hidden: Tensor) -> Tensor:
        return hidden


@dataclass
class KangarooState(RowState):
    """The state of one batch.

    Attributes:
        cache: the adapter's keys and values, with R tree rows.
        rows: the same rows in the target's own cache; None until it is shared.
        tree: who sees whom among these rows. The root is the first level, of one row, after a first place for nothing.
        confidence: [B, 1 + R] float32, the chance of each row's best child, from the second place on.
        threshold: the config's value at the start of the text.
    """

    cache: DraftCache
    rows: SharedRows | None
    tree: TreeRows
    confidence: Tensor
    threshold: float | None
    row_fields = ("cache", "tree", "confidence")
    begins_with: ClassVar[dict[str, float]] = {"confidence": 1.0}


class KangarooHeads(DraftHeads):
    """The adapter between the exit layer and the target's frozen LM head."""

    config_class = KangarooConfig
    has_static_state = True
    borrows_lm_head = True
    default_loss = "distillation"  # section 3.1: cross-entropy to the target's distribution
    runs_target_layers = True
    shares_target_cache = True

    def __init__(self, config: KangarooConfig) -> None:
        super().__init__(config)
        self.adapter = KangarooAdapter(config)
        self.norm = RMSNorm(config.target_hidden_size, config.rms_norm_eps)
        self.post_init()

    def check_target(self, target: Target) -> None:
        """Also refuses a target whose first layers do not run by themselves, or whose logits depend on more than its
        last states."""
        super().check_target(target)
        target.prepare_first_layers(self.config.exit_layer)
        target.compute_logits(torch.zeros(1, target.hidden_size, dtype=target.dtype, device=target.device))

    def init_from_target(self, target: Target) -> None:
        """The LM head expects states of the final norm's scale."""
        if (gain := target.final_norm_gain()) is not None:
            self.norm.weight.copy_(gain)

    def score(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V], by the target's LM head."""
        return self.score_as_target(self.norm(hidden))

    # Training.

    def unroll(self, features: Tensor, input_ids: Tensor) -> list[DraftStep]:
        """One step, for every depth. Slot t predicts the token at t + 2 from the adapter's output at t + 1, so it reads
        the features up to t + 1."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        hidden = self.adapter.unroll(features.to(self.compute_dtype), positions, [])
        return [DraftStep(2, nn.functional.pad(hidden[:, 1:], (0, 0, 0, 1)), self.score)]

    # Decoding.

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> KangarooState:
        self.config.check_settings()
        num_rows = 1 + num_scratch
        cache = self.adapter.self_attn.new_cache(batch_size, num_slots=max_length, num_scratch=num_rows)
        confidence = torch.ones(batch_size, 1 + num_rows, device=self.device)
        tree = TreeRows(batch_size, num_rows, self.device)
        return KangarooState(cache, None, tree, confidence, self.config.confidence_threshold)

    def restart(self, state: KangarooState, num_rows: int) -> None:
        super().restart(state, num_rows)
        state.threshold = self.config.confidence_threshold

    def share_cache(self, state: KangarooState, cache: KVCache) -> None:
        if state.rows is None or state.rows.cache is not cache:
            state.rows = SharedRows(cache, state.cache.num_scratch)

    def extend(
        self, state: KangarooState, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        assert features is not None
        assert state.rows is not None, "share_cache comes before extend"
        positions = state.cache.lengths[:, None] + torch.arange(features.shape[1], device=features.device)
        _, keys, values = self.adapter.project(features.to(self.compute_dtype), positions)
        state.cache.open(features.shape[1], counts, max_slots).update(keys, values)
        state.rows.max_slots = max_slots
        state.tree.forget_levels()
        root_ids = last_slot(next_token_ids, counts)
        logits = self._draft(state, root_ids, state.tree.open_level(torch.zeros_like(root_ids)))
        return DraftLogits(logits, self.draft_token_ids)

    def expand(self, state: KangarooState, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        level = state.tree.open_level(parents)
        drawn_with = level.parents_of(state.confidence)
        logits = self._draft(state, token_ids, level)
        if state.threshold is not None:
            logits = logits.masked_fill((drawn_with < state.threshold)[..., None], float("-inf"))
        return DraftLogits(logits, self.draft_token_ids)

    def _draft(self, state: KangarooState, token_ids: Tensor, level: Level) -> Tensor:
        """Scores [B, W, V] of the children of one level's nodes [B, W]."""
        cache, rows = state.cache, state.rows
        assert rows is not None
        rows.open_level(level.own, level.depth, state.tree.depths)
        features = self.target.run_first_layers(rows, token_ids, level.ancestors, num_layers=self.config.exit_layer)
        positions = (cache.lengths[:, None] + level.depth).expand_as(token_ids)
        nodes = cache.open_scratch(level.own, level.ancestors)
        logits = self.score(self.adapter.decode(features.to(self.compute_dtype), positions, nodes))
        wide = logits.float()
        state.confidence.index_copy_(1, level.places, (wide.amax(-1) - wide.logsumexp(-1)).exp())
        return logits
