"""EAGLE-1 (arXiv 2401.15077): one decoder layer continues the target's last states, and the target's LM head scores
them.

Legend: D hidden size, V target vocabulary.

Slot t pairs f_t, the target's post-norm last state of position t, with the embedding of x_{t+1}. The layer, which has
no input norm, reads z = fc([scale * emb(x_{t+1}); f_t]) and returns an estimate of f_{t+1}. From it the target's own LM
head (frozen, borrowed, never saved; no norm before it) predicts x_{t+2}. In a tree the f of a drafted node is its
parent's output; `autoregression.py` has the drafting.

EAGLE-2 (arXiv 2406.16858) is these weights with `draftsmith.DynamicTree`. HASS (arXiv 2408.15766) is these weights
trained with `ttt_steps=3` and `topk_distillation` in the loss: configs/train/hass-chat-13m.yaml.
"""

import math
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from draftsmith.heads.autoregression import AutoregressionConfig, AutoregressionHeads
from draftsmith.heads.modules.draft_step import DraftStep
from draftsmith.heads.modules.host_tensors import send
from draftsmith.heads.modules.layers import DraftAttention, DraftLayer
from draftsmith.heads.modules.vocabulary import balance_embeddings
from draftsmith.inference.noise import uniform_noise
from draftsmith.inference.targets.target import Target

NOISE_LENGTH = 512  # tokens of the longest sequence whose noise has the config's width


class EagleConfig(AutoregressionConfig):
    """The settings of EAGLE-1, EAGLE-2 and HASS heads.

    Args:
        ttt_steps: aligned steps in training: 1 = EAGLE-1, 3 = HASS.
        fc_bias: whether fc has a bias. The authors' code has one. vLLM drops the bias, so the default has none.
        feature_noise: width of the uniform noise on the target's states in training; 0 = no noise. From 512 tokens on
            the width falls as 512 / length up to the last token with a loss (the authors' code: whole length, and
            shorter sequences get more noise).
        embedding_scale: factor of the token embeddings before fc, a power of two. None (from_target): when heads are
            created, the one that gives embeddings the scale of the states (`balance_embeddings`); from much smaller
            inputs fc hardly learns to read the token. Exports multiply it into fc. Published heads have 1.
        **kwargs: arguments of `AutoregressionConfig`.
    """

    model_type = "draftsmith_eagle"
    head_type: ClassVar[str] = "eagle"
    reads_one_layer = True

    fc_bias: bool = False
    feature_noise: float = 0.2
    embedding_scale: float | None = 1.0

    def __post_init__(self, **kwargs: Any) -> None:
        self.check_range("feature_noise", 0)
        scale = self.embedding_scale
        if scale is not None and (scale <= 0 or math.frexp(scale)[0] != 0.5):
            raise ValueError(f"embedding_scale is {scale}; allowed are powers of two, such as 0.5, 1 or 32")
        super().__post_init__(**kwargs)
        if self.target_num_layers and self.feature_layers != [self.target_num_layers]:
            raise ValueError(
                f"feature_layers is {self.feature_layers}; EAGLE-1 continues the target's last state, so allowed is "
                f"[{self.target_num_layers}]: leave it out"
            )

    @classmethod
    def from_target(cls, target: Target, **overrides: Any) -> Self:
        return super().from_target(target, **{"embedding_scale": None, **overrides})


class EagleLayer(DraftLayer):
    """A decoder layer without an input norm: q, k and v read its residual."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        size = config.hidden_size
        attention = DraftAttention(config, size, size, window=config.window(0))
        self.add_blocks(config, attention, size)


class EagleHeads(AutoregressionHeads):
    """The EAGLE-1 draft head. Tensors have the names of EAGLE-1 checkpoints (`fc`, `layers.0`)."""

    config_class = EagleConfig
    has_static_state = True
    borrows_lm_head = True
    default_loss = "smooth_l1+0.1*distillation"  # section 3.2: w_cls 0.1
    estimates_states = True
    # HASS weighs all steps alike and stops gradients between them.
    default_step_decay = 1.0
    detaches_steps = True

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        if config.fc_bias:
            nn.init.zeros_(self.fc.bias)
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.post_init()

    def init_from_target(self, target: Target) -> None:
        super().init_from_target(target)
        if self.config.embedding_scale is None:
            self.config.embedding_scale = balance_embeddings(target)

    @property
    def draft_layers(self) -> tuple[EagleLayer]:
        return (cast(EagleLayer, self.layers[0]),)

    def fuse(self, features: Tensor) -> Tensor:
        return features.to(self.compute_dtype)

    def prepare(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        z = self.fc(torch.cat([embedded * self.config.embedding_scale, state], dim=-1))
        return z, z

    def score(self, hidden: Tensor) -> Tensor:
        return self.score_as_target(hidden)

    def unroll_where(
        self, features: Tensor, input_ids: Tensor, loss_mask: Tensor, token_seeds: Tensor | None = None
    ) -> list[DraftStep]:
        """`unroll`. With `token_seeds` the target's states get noise, so that the layer learns to read its own outputs,
        which have errors (EAGLE, section 3.2)."""
        if token_seeds is not None and self.config.feature_noise > 0:
            states = self.fuse(features)
            lengths = (loss_mask * torch.arange(1, loss_mask.shape[1] + 1)).amax(1, keepdim=True)
            width = send(self.config.feature_noise * (NOISE_LENGTH / lengths).clamp(max=1.0), states.device)
            seeds = send(token_seeds, states.device)
            noise = uniform_noise(seeds.flatten(), states.shape[-1]).view_as(states) - 0.5
            features = states + (width[..., None] * noise).to(states.dtype)
        return self.unroll(features, input_ids)
