"""Hydra (arXiv 2402.05109): sequential Medusa heads. Each head reads the tokens drafted before its own.

Legend: B batch, T sequence length, S slots of one call, W frontier nodes, R tree rows, D hidden size,
V target vocabulary, K heads.

Head i (i = 0..K-1) predicts x_{t+2+i} from h_t, the target's post-norm state, and the embeddings of x_{t+1} to
x_{t+1+i}. x_{t+1} is the root, the others are the drafted path of the node; in training they are the data's tokens. A
head is an MLP over the concatenation, then an LM head.

Hydra++, of the same paper, is `use_prefix_attention=True, num_layers=4`: the output of one decoder layer over the
target's states, run once per decoding step, replaces h_t, and the objective is the target's distribution.

Some things differ from the authors' code (github.com/zankner/Hydra), the first three of them by options: token
embeddings are normed, projections have no bias, and no norm follows the prefix layer. Untrained heads repeat the LM
head exactly, and the blocks of a head share no weights.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from draftsmith.heads.base import DraftHeads
from draftsmith.heads.config import DecoderConfig, decoder_settings
from draftsmith.heads.kinds.medusa import ResidualBlock
from draftsmith.heads.modules.draft_step import DraftStep
from draftsmith.heads.modules.layers import DecoderLayer, DraftCache, RMSNorm, last_slot
from draftsmith.inference.drafters.base import DraftLogits
from draftsmith.inference.drafters.row_state import RowState
from draftsmith.inference.targets.target import Target


class HydraConfig(DecoderConfig):
    """The settings of Hydra and Hydra++ heads.

    Args:
        num_heads: K, one for each drafted token (the authors' recipe has 4).
        num_layers: blocks of each head's MLP; the first block reads the concatenation (1 as in Medusa; 4 in the
            authors' recipe of Hydra++).
        use_prefix_attention: Hydra++'s decoder layer over the target's states. The default loss is then distillation;
            without the layer it is cross-entropy to the data's tokens, as for Medusa.
        use_embedding_norm: an RMSNorm on the token embeddings. The authors have none. Embeddings may be far smaller
            than h_t, and their weights then learn slowly.
        use_biases: biases on the residual projections and the LM heads, as in the authors' code.
        use_prefix_norm: an RMSNorm after the prefix layer, as in the authors' code. Untrained heads then do not repeat
            the LM head.
        dropout: before each block and the LM head, in training (0.2 in the authors' recipe of Hydra++, for 10 epochs).
        **kwargs: arguments of `DecoderConfig`; only the prefix layer reads its shape.
    """

    model_type = "draftsmith_hydra"
    head_type: ClassVar[str] = "hydra"
    reads_one_layer = True

    num_heads: int = 4
    num_layers: int = 1
    use_prefix_attention: bool = False
    use_embedding_norm: bool = True
    use_biases: bool = False
    use_prefix_norm: bool = False
    dropout: float = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        self.check_range("num_heads", 1)
        self.check_range("num_layers", 1)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; allowed is 0 (none) up to, not including, 1")
        if self.use_prefix_norm and not self.use_prefix_attention:
            raise ValueError(
                "use_prefix_norm is true, but there is no prefix layer: set use_prefix_attention to true too"
            )
        super().__post_init__(**kwargs)

    @classmethod
    def from_target(cls, target: Target, **overrides: Any) -> Self:
        shape = decoder_settings(target.text_config).keys() - {"rms_norm_eps"}
        if not overrides.get("use_prefix_attention") and (given := ", ".join(sorted(overrides.keys() & shape))):
            raise ValueError(
                f"{given} given, but only the prefix layer reads them: set use_prefix_attention to true, or leave "
                "them out"
            )
        return super().from_target(target, **overrides)


class PrefixLayer(DecoderLayer):
    """Hydra++'s prefix attention: one decoder layer over the states h_0..h_t, with RoPE position t for h_t.

    Both its residual branches start at zero, so that it returns h_t until it is trained, if no norm follows it.
    """

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config, config.target_hidden_size)
        self.norm = RMSNorm(config.target_hidden_size, config.rms_norm_eps) if config.use_prefix_norm else nn.Identity()
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def forward(self, states: Tensor) -> Tensor:
        """states [B, T, D] of whole sequences -> [B, T, D]."""
        batch, length, _ = states.shape
        positions = torch.arange(length, device=states.device).expand(batch, -1)
        return cast(Tensor, self.norm(self.unroll(states, positions, [])))

    def read_last(self, states: Tensor, counts: Tensor, cache: DraftCache, max_slots: int) -> Tensor:
        """Appends counts[b] of the states [B, S, D] of new slots to the cache, and returns the layer's output [B, 1, D]
        at the last of them."""
        positions = cache.lengths[:, None] + torch.arange(states.shape[1], device=states.device)
        rows = cache.open(states.shape[1], counts, max_slots, reads_last=True)
        return cast(Tensor, self.norm(self.decode(states, positions, rows)))


class ConcatBlock(nn.Module):
    """Px + SiLU(Wx + b) of x = [h, token, .., token], of width D (the authors' code).

    At the start P selects h, and W and b are zero, so that an untrained head repeats the LM head, as Medusa's do.
    """

    def __init__(self, size: int, num_tokens: int, *, has_bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear((1 + num_tokens) * size, size)
        self.residual = nn.Linear((1 + num_tokens) * size, size, bias=has_bias)
        if has_bias:
            nn.init.zeros_(self.residual.bias)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        nn.init.eye_(self.residual.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.residual(inputs) + nn.functional.silu(self.linear(inputs)))


@dataclass
class HydraState(RowState):
    """The state of one batch.

    Attributes:
        hidden: [B, 1, D] h_t of each row's last slot, or the prefix layer's output there.
        paths: [B, max(1, R), K] int64; its first W rows are the last frontier, with the depth + 1 tokens from the root
            to each node. The rest is garbage.
        cache: the prefix layer's keys and values of accepted slots; None without that layer.
    """

    hidden: Tensor
    paths: Tensor
    cache: DraftCache | None
    row_fields = ("hidden", "paths", "cache")


class HydraHeads(DraftHeads):
    """K heads; head i reads h_t and the i + 1 tokens after it. As in the authors' code, the loss is the plain sum over
    the heads."""

    config_class = HydraConfig
    has_static_state = True
    borrows_lm_head = False
    default_step_decay = 1.0
    default_learning_rate = 1e-3  # as for Medusa, whose code the authors' extends

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        self.default_loss = "distillation" if config.use_prefix_attention else "cross_entropy"
        size = config.target_hidden_size
        self.prefix = PrefixLayer(config) if config.use_prefix_attention else None
        self.embedding_norm = RMSNorm(size, config.rms_norm_eps) if config.use_embedding_norm else nn.Identity()
        self.mlps = nn.ModuleList(self._make_mlp(config, num_tokens=i + 1) for i in range(config.num_heads))
        self.lm_head = nn.ModuleList(
            nn.Linear(size, config.target_vocab_size, bias=config.use_biases) for _ in range(config.num_heads)
        )
        if config.use_biases:
            for lm_head in self.lm_head:
                nn.init.zeros_(cast(Tensor, lm_head.bias))
        self.post_init()

    @staticmethod
    def _make_mlp(config: HydraConfig, num_tokens: int) -> nn.Sequential:
        size = config.target_hidden_size
        first = ConcatBlock(size, num_tokens, has_bias=config.use_biases)
        blocks = [first, *(ResidualBlock(size) for _ in range(config.num_layers - 1))]
        dropouts = [nn.Dropout(config.dropout) for _ in range(config.num_layers + 1)]
        return nn.Sequential(dropouts[0], *(part for pair in zip(blocks, dropouts[1:], strict=True) for part in pair))

    @property
    def max_depth(self) -> int:  # type: ignore[override]
        return int(self.config.num_heads)

    def init_from_target(self, target: Target) -> None:
        weight = target.lm_head_weight()
        for lm_head in self.lm_head:
            cast(Tensor, lm_head.weight).copy_(weight)

    def embed_normed(self, token_ids: Tensor) -> Tensor:
        return cast(Tensor, self.embedding_norm(self.embed(token_ids)))

    # Training.

    def unroll(self, features: Tensor, input_ids: Tensor) -> list[DraftStep]:
        """At slot t, head i reads x_{t+1} to x_{t+1+i} of the data."""
        hidden = features.to(self.compute_dtype)
        if self.prefix is not None:
            hidden = self.prefix(hidden)
        embedded, length = self.embed_normed(input_ids), input_ids.shape[1]
        inputs, steps = [hidden], []
        for i, mlp in enumerate(self.mlps):
            inputs.append(nn.functional.pad(embedded[:, i + 1 :], (0, 0, 0, min(i + 1, length))))
            steps.append(DraftStep(2 + i, mlp(torch.cat(inputs, dim=-1)), self.lm_head[i]))
        return steps

    # Decoding.

    @property
    def reads_last_only(self) -> bool:  # type: ignore[override]
        return self.prefix is None

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> HydraState:
        cache = None
        if self.prefix is not None:
            # No tree rows: the layer reads no drafted tokens.
            cache = self.prefix.self_attn.new_cache(batch_size, num_slots=max_length, num_scratch=0)
        hidden = torch.zeros(batch_size, 1, self.config.target_hidden_size, device=self.device, dtype=self.dtype)
        paths = torch.zeros(batch_size, max(1, num_scratch), self.max_depth, dtype=torch.long, device=self.device)
        return HydraState(hidden, paths, cache)

    def extend(
        self, state: HydraState, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        assert features is not None
        states = features.to(self.compute_dtype)
        if self.prefix is not None and state.cache is not None:
            newest = self.prefix.read_last(states, counts, state.cache, max_slots)
        else:
            newest = last_slot(states, counts)
        hidden = torch.where((counts > 0)[:, None, None], newest, state.hidden)
        root_ids = last_slot(next_token_ids, counts)
        state.hidden.copy_(hidden)
        state.paths.narrow(1, 0, 1).narrow(2, 0, 1).copy_(root_ids[..., None])
        return DraftLogits(self._score(0, hidden, root_ids[..., None]), self.draft_token_ids)

    def expand(self, state: HydraState, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        """`Drafter.expand`. The depth is a number: choosing a head's weights by a tensor would copy them."""
        above = state.paths.narrow(2, 0, depth).gather(1, parents[..., None].expand(-1, -1, depth))
        paths = torch.cat([above, token_ids[..., None]], dim=-1)
        state.paths.narrow(1, 0, token_ids.shape[1]).narrow(2, 0, depth + 1).copy_(paths)
        return DraftLogits(self._score(depth, state.hidden, paths), self.draft_token_ids)

    def _score(self, index: int, hidden: Tensor, paths: Tensor) -> Tensor:
        """Logits [B, W, V] of head `index` after the paths [B, W, index + 1]; hidden [B, 1, D]."""
        tokens = self.embed_normed(paths).flatten(2)  # [B, W, (index + 1) * D]
        inputs = torch.cat([hidden.expand(-1, tokens.shape[1], -1), tokens], dim=-1)
        return cast(Tensor, self.lm_head[index](self.mlps[index](inputs)))
