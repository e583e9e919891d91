"""The blocks of draft layers against slow references: rotary positions, norms, the draft cache."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPTNeoXConfig, OPTConfig

from draftsmith.heads import create_heads
from draftsmith.heads.config import decoder_settings
from draftsmith.heads.kinds.eagle3 import Eagle3Config
from draftsmith.heads.modules.layers import RMSNorm, RotaryEmbedding, rotate
from tests.tiny_targets import tiny_target


def attention_config() -> Eagle3Config:
    return Eagle3Config(num_attention_heads=4, num_key_value_heads=2, head_dim=8)


def unsigned(sin: Tensor) -> Tensor:
    """Sines [B, 1, Q, d] as transformers has them: [B, Q, d]."""
    first, second = sin[:, 0].chunk(2, dim=-1)
    return torch.cat([-first, second], dim=-1)


class TestRotaryEmbedding:
    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "default", "rope_theta": 10000.0},
            {"rope_type": "default", "rope_theta": 500000.0},
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
            {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ],
        ids=lambda rope: f"{rope['rope_type']}-{rope['rope_theta']:g}" if "rope_type" in rope else "gemma3",
    )
    def test_equals_the_targets(self, rope: dict[str, Any]) -> None:
        is_per_type = "full_attention" in rope
        model: Any = tiny_target("gemma3" if is_per_type else "llama", rope_parameters=rope)
        heads: Any = create_heads("eagle3", model)
        positions = torch.tensor([[0, 1, 7, 63, 255], [3, 4, 5, 100, 5000]])
        cos, sin = heads.midlayer.self_attn.rope(positions)
        expected = model.model.rotary_emb(torch.zeros(1), positions, *["full_attention"] * is_per_type)
        torch.testing.assert_close((cos[:, 0], unsigned(sin)), expected)

    def test_low_precision_is_turned_in_float32(self) -> None:
        rope = RotaryEmbedding(attention_config())
        positions = torch.tensor([[4001]])
        x = torch.randn(1, 1, 1, 8).bfloat16()
        found = rotate(x, *rope(positions))
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, rotate(x.float(), *rope(positions)).bfloat16())


class TestDecoderSettings:
    @pytest.mark.parametrize(
        "config",
        [
            GPT2Config(n_embd=64, n_head=4),
            OPTConfig(hidden_size=64, num_attention_heads=4),
            GPTNeoXConfig(hidden_size=64, num_attention_heads=4, intermediate_size=256),
        ],
        ids=lambda config: config.model_type,
    )
    def test_of_targets_without_such_settings(self, config: Any) -> None:
        settings = decoder_settings(config)
        assert settings["num_key_value_heads"] == 4
        assert settings["head_dim"] == 16
        assert settings["intermediate_size"] == 256
        assert settings["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}

    @pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
    def test_rope_that_reads_the_whole_pass_is_not_inherited(self, rope_type: str) -> None:
        config = SimpleNamespace(
            hidden_size=64,
            num_attention_heads=4,
            rope_parameters={"rope_type": rope_type, "rope_theta": 777.0, "factor": 2.0},
        )
        settings = decoder_settings(config)
        assert settings["rope_parameters"] == {"rope_type": "default", "rope_theta": 777.0}

    def test_whole_heads_are_turned_even_where_the_target_turns_a_part(self) -> None:
        config = SimpleNamespace(
            hidden_size=64,
            num_attention_heads=4,
            rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5},
        )
        settings = decoder_settings(config)
        rope = RotaryEmbedding(Eagle3Config(**settings))
        assert rope(torch.tensor([[3]]))[0].shape[-1] == settings["head_dim"] == 16


class TestNarrowNorm:
    """An RMSNorm under autocast: a bfloat16 input, a float32 weight."""

    @pytest.mark.parametrize("shape", [(2, 3, 16), (16,)], ids=str)
    def test_its_gradients_are_those_of_autograd(self, shape: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        norm = RMSNorm(16, 1e-6)
        torch.nn.init.normal_(norm.weight)
        x = torch.randn(shape).bfloat16().requires_grad_()
        slope = torch.randn(shape)
        found = torch.autograd.grad((norm(x).float() * slope).sum(), [x, norm.weight])
        wide = x.detach().float().requires_grad_()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * norm.weight
        expected = torch.autograd.grad((normed * slope.bfloat16().float()).sum(), [wide, norm.weight])
        assert norm(x).dtype == torch.bfloat16
        torch.testing.assert_close(norm(x), normed.bfloat16())
        torch.testing.assert_close(found[0], expected[0].bfloat16())
        torch.testing.assert_close(found[1], expected[1])

    def test_keeps_no_float32_copy_of_its_input(self) -> None:
        norm, x = RMSNorm(64, 1e-6), torch.randn(8, 64).bfloat16().requires_grad_()
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
        ):
            norm(x)
        assert [tensor.shape for tensor in kept if tensor.dtype == torch.float32] == [(64,), (8, 1)]
