"""Random heads of every kind, far from how training starts: zero blocks and copied LM heads would hide mistakes. And
what tests of several kinds ask of them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from draftsmith.heads import HEAD_TYPES, DraftHeads, create_heads
from draftsmith.inference import Target
from draftsmith.training.features.encoding import TargetStates, encode
from draftsmith.training.losses.draft_loss import LossOutput, draft_loss
from draftsmith.training.losses.teacher import compute_teacher
from tests.params import slow_but
from tests.tiny_targets import tiny_target

# Head type -> the configurations that are tested; a kind that is not named here is tested with its defaults.
AS_PUBLISHED = {"fc_norm": False, "norm_output": False}  # EAGLE-3 as its authors and llama.cpp have it
_VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "block": (
        {"block_size": 4},
        {
            "block_size": 3,
            "num_layers": 1,
            "mask_token_id": None,
            "predicts_at_anchor": True,
            "markov_rank": 6,
            "has_confidence": True,
        },
        {"block_size": 4, "is_causal": True, "num_anchors": 6, "markov_rank": 4, "num_key_value_heads": 4},
        {"block_size": 4, "sliding_window": 5},
        {
            "block_size": 4,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 5,
            "sliding_is_causal": True,
        },
    ),
    "dflash2": (
        {"block_size": 4, "selector_rank": 8, "conv_group_size": 4},
        {
            "block_size": 5,
            "num_layers": 1,
            "conv_kernel_size": 3,
            "selector_rank": 6,
            "selector_top_k": 12,
            "predicts_at_anchor": True,
            "sliding_window": 5,
        },
    ),
    "eagle": (
        {"ttt_steps": 5},
        {"ttt_steps": 3, "fc_bias": True, "num_key_value_heads": 4},
        {"ttt_steps": 3, "qkv_bias": True, "own_embedding": True},
    ),
    "eagle3": (
        {"ttt_steps": 5, **AS_PUBLISHED},
        {"ttt_steps": 4, **AS_PUBLISHED, "draft_vocab_size": 40, "num_key_value_heads": 4},
        {"ttt_steps": 4},
        {"ttt_steps": 3, "fc_norm": False, "draft_vocab_size": 40},
        # As speculators trains them, and with what published heads have beside.
        {
            "ttt_steps": 3,
            **dict.fromkeys(("norm_before_residual", "norm_before_fc", "norm_output"), True),
            **dict.fromkeys(("qkv_bias", "o_bias", "own_embedding"), True),
        },
        {"ttt_steps": 4, "num_layers": 3, "sliding_window": 4},
        {"num_layers": 2, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "hydra": (
        {"num_layers": 2},
        {"num_heads": 3, "use_embedding_norm": False},
        {"num_layers": 2, "use_prefix_attention": True},  # Hydra++
        {"num_layers": 2, "use_prefix_attention": True, "use_prefix_norm": True, "use_biases": True},
    ),
    # A layer of each kind of attention within 4 layers of every family.
    "kangaroo": ({}, {"exit_layer": 4, "num_key_value_heads": 4}),
    "medusa": ({}, {"num_heads": 3, "num_layers": 2}, {"num_heads": 3, "shares_lm_head": True}),
    "mtp": (
        {},
        {"num_steps": 3, "norm_output": False, "hidden_first": True, "zero_first_embedding": True},
        {"share_block": False},
        {"sliding_window": 4},
    ),
    "parallel": (
        {"num_depths": 4},
        {"num_depths": 3, "num_layers": 1, "draft_vocab_size": 40, "num_key_value_heads": 4, "keep_ratio": 0.5},
        {"num_depths": 3, "own_embedding": True, "mask_token_id": 5, "fc_norm": True},
        {"num_depths": 4, "sliding_window": 4},
    ),
}
VARIANTS = [(kind, overrides) for kind in HEAD_TYPES for overrides in _VARIANTS.get(kind, ({},))]
VARIANT_IDS = [f"{kind}-{index}" for kind in HEAD_TYPES for index in range(len(_VARIANTS.get(kind, ({},))))]
FIRST = {name for name in VARIANT_IDS if name.endswith("-0")}
# For tests whose subject is the kind: the other configurations are marked slow.
FIRST_BY_DEFAULT = slow_but(FIRST, dict(zip(VARIANT_IDS, VARIANTS, strict=True)))


def tiny_heads(head_type: str, target: Target, seed: int = 0, **overrides: Any) -> DraftHeads:
    """Builds heads for `target` whose every trained parameter is random, with a fitted vocabulary, in eval mode."""
    heads = create_heads(head_type, target, **overrides)
    generator = torch.Generator().manual_seed(seed)
    if heads.wants_token_counts:
        heads.fit_vocabulary(torch.randint(0, 1000, (target.vocab_size,), generator=generator).to(target.device))
    with torch.no_grad():
        for parameter in filter(lambda parameter: parameter.requires_grad, heads.parameters()):
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.2 * noise)
    return heads.eval()


def encode_for(heads: DraftHeads, input_ids: Tensor) -> TargetStates:
    """What the heads' target gives them for whole rows."""
    return encode(heads.target, input_ids, torch.ones_like(input_ids), feature_layers=heads.feature_layers)


def compute_loss(
    heads: DraftHeads,
    states: TargetStates,
    input_ids: Tensor,
    loss_mask: Tensor,
    *,
    loss_type: str,
    depth_weights: str | None = None,
    **options: Any,
) -> LossOutput:
    """The loss of one batch, inside the heads' forward as in training, whose further arguments are `options`."""
    teacher = compute_teacher(
        heads.target, states.last_hidden, input_ids, loss_mask, heads.draft_token_ids, loss_type=loss_type
    )
    loss_fn = partial(
        draft_loss,
        teacher=teacher,
        loss_mask=loss_mask,
        loss_type=loss_type,
        step_decay=0.8,
        depth_weights=depth_weights,
    )
    return heads(states.features, input_ids, loss_fn=loss_fn, loss_mask=loss_mask, **options)


def plain_eagle3(target: Target, **overrides: Any) -> DraftHeads:
    return tiny_heads("eagle3", target, **AS_PUBLISHED | overrides)


def target_with_gains(family: str) -> tuple[Any, nn.Module]:
    """A small model whose final norm has random gains, and that norm. "gpt2" has a LayerNorm: only its gain can be
    taken over."""
    if family == "gpt2":
        model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=6, n_head=4, n_positions=64)).eval()
        final_norm = model.transformer.ln_f
    else:
        model = tiny_target(family)
        final_norm = model.model.norm
    with torch.no_grad():
        final_norm.weight.uniform_(0.5, 2.0)
    return model, final_norm
