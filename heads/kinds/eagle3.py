"""EAGLE-3 (arXiv 2503.01840): a decoder layer over fused features of three target layers, trained on its own outputs.

Legend: D hidden size, V target vocabulary, Vd draft vocabulary.

Slot t pairs g_t = fc(features of position t) with the embedding of x_{t+1} and predicts x_{t+2}. In a tree the g of a
drafted node is its parent's output before the final norm; `autoregression.py` has the drafting.

New heads are EAGLE-3.1 (arXiv 2605.09992): `fc_norm` and `norm_output` give g the same scale at every step.
"""

from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from draftsmith.heads.autoregression import AutoregressionConfig, AutoregressionHeads
from draftsmith.heads.draft_vocabulary import default_draft_vocabulary
from draftsmith.heads.modules.layers import DecoderLayer, DraftAttention, DraftLayer, RMSNorm
from draftsmith.heads.modules.vocabulary import map_tensors, most_frequent_tokens, move_rows
from draftsmith.inference.targets.target import Target


def default_feature_layers(num_layers: int) -> list[int]:
    """A low, a middle and a high tapped layer: (2, n // 2, n - 3) as in the authors' code, or three neighbours where
    these collide (n up to 6).

    >>> default_feature_layers(32), default_feature_layers(5)
    ([2, 16, 29], [1, 2, 3])
    """
    layers = [2, num_layers // 2, num_layers - 3]
    if layers[0] < layers[1] < layers[2]:
        return layers
    if num_layers < 2:
        raise ValueError(f"EAGLE-3 taps three distinct layers; a target of {num_layers} layer(s) has too few")
    middle = min(max(num_layers // 2, 1), num_layers - 1)
    return [middle - 1, middle, middle + 1]


class Eagle3Config(AutoregressionConfig):
    """The settings of EAGLE-3 heads.

    Args:
        draft_vocab_size: tokens that the draft head scores; None = all of the target's (from_target:
            `default_draft_vocabulary`).
        ttt_steps: steps of the training-time test (the authors' code uses 7).
        num_layers: EAGLE-3's layer plus the plain decoder layers above it.
        fc_norm: an RMSNorm on each tapped feature before fc (EAGLE-3.1). On in new heads, as `norm_output`: without
            norms, layers of small states learn less. The authors' code and llama.cpp know neither.
        norm_output: the output AFTER the final norm is the next step's g, in training and in decoding (EAGLE-3.1).
        norm_before_residual: the layer's residual is g after `hidden_norm`, not before it (heads by speculators).
        norm_before_fc: one RMSNorm over all tapped features together, before fc (heads by speculators).
        **kwargs: arguments of `AutoregressionConfig`.
    """

    model_type = "draftsmith_eagle3"
    head_type: ClassVar[str] = "eagle3"

    draft_vocab_size: int | None = None
    ttt_steps: int = 7
    num_layers: int = 1
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.check_range("num_layers", 1)
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc both norm the features before fc: set one of them")
        super().__post_init__(**kwargs)
        self.check_range("draft_vocab_size", 1, self.target_vocab_size or None)
        if self.target_num_layers and not self.feature_layers:
            raise ValueError("feature_layers is empty; EAGLE-3 reads at least one layer (the authors use three)")

    @property
    def vocab_size(self) -> int:
        return self.draft_vocab_size or self.target_vocab_size

    @classmethod
    def from_target(cls, target: Target, **overrides: Any) -> Self:
        usual: dict[str, Any] = {
            "draft_vocab_size": default_draft_vocabulary(target.vocab_size, target.hidden_size, target.layers_size),
            "fc_norm": not overrides.get("norm_before_fc", False),
            "norm_output": True,
        }
        if "feature_layers" not in overrides:
            usual["feature_layers"] = default_feature_layers(target.num_layers)
        return super().from_target(target, **{**usual, **overrides})


class Eagle3Layer(DraftLayer):
    """q, k and v read [input_norm(embedding), hidden_norm(g)] (2D); the residual is g, normed only with
    `norm_before_residual`."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        attention = DraftAttention(config, 2 * size, size, window=config.window(0))
        self.add_blocks(config, attention, size)


class Eagle3Heads(AutoregressionHeads):
    """The EAGLE-3 draft head. Tensors have the names of EAGLE-3 checkpoints (`input_norm`, `fc_norm`, `fc`,
    `midlayer`, `layers`, `norm`, `lm_head`, `d2t`, `t2d`)."""

    config_class = Eagle3Config
    has_static_state = True
    borrows_lm_head = False
    vocabulary_buffers = ("d2t", "t2d")
    default_loss = "distillation"

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        size = config.hidden_size
        num_norms = len(config.feature_layers) if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(RMSNorm(size, config.rms_norm_eps) for _ in range(num_norms))
        width = len(config.feature_layers) * size
        if config.norm_before_fc:
            self.input_norm = RMSNorm(width, config.rms_norm_eps)
        self.fc = nn.Linear(width, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.layers = nn.ModuleList(
            DecoderLayer(config, size, DraftAttention(config, size, size, window=config.window(number)))
            for number in range(1, config.num_layers)
        )
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        self.has_draft_vocab = config.vocab_size != config.target_vocab_size
        if self.has_draft_vocab:
            # d2t is -1 until the vocabulary is fitted.
            self.register_buffer("d2t", torch.full((config.vocab_size,), -1, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(config.target_vocab_size, dtype=torch.bool))
        self._is_fitted = False
        self.post_init()

    # The draft vocabulary.

    @property
    def own_token_ids(self) -> Tensor | None:  # type: ignore[override]
        if not self.has_draft_vocab:
            return None
        return self.d2t + torch.arange(self.d2t.numel(), device=self.d2t.device)

    @property
    def wants_token_counts(self) -> bool:
        if self.has_draft_vocab and not self._is_fitted:  # asked once, because it reads on the host
            self._is_fitted = bool(self.t2d.any())
        return self.has_draft_vocab and not self._is_fitted

    def fit_vocabulary(self, token_counts: Tensor) -> None:
        super().fit_vocabulary(token_counts)
        if not self.wants_token_counts:  # the LM head's rows belong to the fitted vocabulary
            return
        token_ids = most_frequent_tokens(token_counts, self.config.vocab_size).to(self.device)
        self.d2t, self.t2d = map_tensors(token_ids, self.config.target_vocab_size)
        with torch.no_grad():
            self.lm_head.weight.copy_(self.target.lm_head_weight()[token_ids])

    @torch.no_grad()
    def choose_vocabulary(self, token_counts: Tensor) -> None:
        if (before := self.own_token_ids) is not None:
            token_ids = most_frequent_tokens(token_counts, len(before)).to(self.device)
            weight = self.lm_head.weight
            weight.copy_(move_rows(weight, before, token_ids, self.target.lm_head_weight()))
            for buffer, tensor in zip((self.d2t, self.t2d), map_tensors(token_ids, len(self.t2d)), strict=True):
                buffer.copy_(tensor)
        super().choose_vocabulary(token_counts)

    def init_from_target(self, target: Target) -> None:
        """The LM head expects states of the final norm's scale, so both start from the target's. `fit_vocabulary`
        copies the rows of a reduced vocabulary."""
        super().init_from_target(target)
        if (gain := target.final_norm_gain()) is not None:
            self.norm.weight.copy_(gain)
        if not self.has_draft_vocab:
            self.lm_head.weight.copy_(target.lm_head_weight())

    # The layer's inputs and the scores of its outputs.

    @property
    def draft_layers(self) -> tuple[Eagle3Layer, *tuple[DecoderLayer, ...]]:
        return (self.midlayer, *cast(list[DecoderLayer], list(self.layers)))

    def fuse(self, features: Tensor) -> Tensor:
        features = features.to(self.compute_dtype)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return cast(Tensor, self.fc(features))

    def prepare(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        normed = layer.hidden_norm(state)
        inputs = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        return normed if self.config.norm_before_residual else state, inputs

    def finish(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.norm(hidden)) if self.config.norm_output else hidden

    def score(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.lm_head(hidden if self.config.norm_output else self.norm(hidden)))
