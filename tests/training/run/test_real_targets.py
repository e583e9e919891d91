"""Every recipe of configs/train/targets trains and decodes on a random target of the same classes, much smaller."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedModel

from draftsmith.heads import DraftHeads
from draftsmith.inference import Target
from tests.conftest import REPOSITORY
from tests.heads.formats.test_native_mtp import name_as_deepseek, random_modules, tiny_mixture, write_checkpoint
from tests.tiny_targets import tiny_target
from tests.training.runner import Runner, assert_greedy_text_is_the_targets, save_word_tokenizer

SIZES: dict[str, Any] = {"vocab_size": 60, "initializer_range": 0.3}


def save_family(family: str, **differences: Any) -> Callable[[Path], PreTrainedModel]:
    def save(folder: Path) -> PreTrainedModel:
        model = tiny_target(family, **{**SIZES, **differences})
        model.save_pretrained(folder)
        return model

    return save


def save_gemma3(folder: Path) -> PreTrainedModel:
    """The 12B model reads images too: its language model is a part of it."""
    text = tiny_target("gemma3", **SIZES).config.to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))
    model.save_pretrained(folder)
    return model


def save_mixture(family: str) -> Callable[[Path], PreTrainedModel]:
    """With an MTP module in the checkpoint."""

    def save(folder: Path) -> PreTrainedModel:
        model = tiny_mixture(family, vocab_size=60)
        write_checkpoint(model, name_as_deepseek(random_modules(model, 1), 2), folder)
        return model

    return save


# Recipe -> how to make a small target of its classes.
TARGETS = {
    "llama-3.1-8b": save_family("llama-llama3"),
    "llama-3.3-70b": save_family("llama-llama3", num_hidden_layers=8),
    "qwen3-0.6b": save_family("qwen3", tie_word_embeddings=True),
    "qwen3-8b": save_family("qwen3"),
    "qwen3-32b": save_family("qwen3", num_hidden_layers=8),
    "qwen3-30b-a3b": save_family("qwen3_moe"),
    "gemma-3-12b": save_gemma3,
    "gpt-oss-20b": save_family("gpt_oss"),
    "glm-4.5-air-mtp": save_mixture("glm4_moe"),
    "deepseek-v3-mtp": save_mixture("deepseek_v3"),
}
RECIPES = sorted((REPOSITORY / "configs" / "train" / "targets").glob("[!s]*.yaml"))
QUICK = ("gemma-3-12b", "deepseek-v3-mtp")


def test_every_recipe_has_a_small_target() -> None:
    assert {path.stem for path in RECIPES} == TARGETS.keys()


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(path, id=path.stem, marks=[] if path.stem in QUICK else pytest.mark.slow) for path in RECIPES],
)
def test_recipe(recipe: Path, conversations: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    TARGETS[recipe.stem](folder)
    save_word_tokenizer(folder)
    train = Runner(folder, conversations, tmp_path / "heads")
    is_native = recipe.stem.endswith("-mtp")
    own = {"init_heads": folder} if is_native else {"head_overrides": "draft_vocab_size=40"}  # of 60 tokens
    quick = {"num_eval_prompts": 1, "eval_max_new_tokens": 4, "report": False}
    train.defaults = quick | {
        "config": recipe,
        "target": folder,
        "dataset": conversations,
        "output_dir": train.output_dir,
    }
    train(**own, max_steps=3, shard_target="none", validation_fraction=0.25, max_eval_samples=4, use_cpu=True)

    settings = yaml.safe_load((train.output_dir / "training_config.yaml").read_text())
    assert (settings["max_length"], settings["packing"]) == (256, True)  # the target's limit
    heads = DraftHeads.from_pretrained(train.output_dir)
    assert heads.config.head_type == ("mtp" if is_native else "eagle3")
    assert heads.num_unrolled_steps == (3 if is_native else 7)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert_greedy_text_is_the_targets(Target(model), heads)
