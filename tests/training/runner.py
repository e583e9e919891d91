"""What tests of whole training runs share: conversations, and a runner with options as on the command line."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from draftsmith.heads import DraftHeads
from draftsmith.inference import Target, generate
from draftsmith.training.features.extraction import NOT_FROM_FILE, OPTION_CLASSES, extract_features
from draftsmith.training.options.command_line import parse_arguments
from draftsmith.training.options.run_options import RunOptions
from draftsmith.training.run.outcome import PreparedRun
from draftsmith.training.run.preparation import prepare_run
from draftsmith.training.run.trainer import HeadsTrainer
from tests.tiny_targets import random_prompt, tiny_target

SPECIAL = ("<pad>", "<|user|>", "<|assistant|>", "<|end|>")
WORDS = [f"word{index}" for index in range(60 - len(SPECIAL))]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def save_chat_target(folder: Path, seed: int = 0, num_hidden_layers: int = 4) -> Path:
    """A Llama of 60 tokens with a tokenizer of one token per word and a chat template, saved in the folder."""
    shape = {"vocab_size": 60, "num_hidden_layers": num_hidden_layers, "initializer_range": 0.2}
    tiny_target("llama", seed, **shape).save_pretrained(folder)
    return save_word_tokenizer(folder)


def save_word_tokenizer(folder: Path) -> Path:
    """A tokenizer of 60 tokens, one per word, with a chat template, saved beside a target."""
    words = Tokenizer(WordLevel({word: index for index, word in enumerate([*SPECIAL, *WORDS])}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:3])})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def write_conversations(path: Path, *, count: int = 24, words: list[str] = WORDS, seed: int = 0) -> Path:
    """Questions of 3 to 8 words; the answers count up through `words` from the question's last."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        question = draw.choices(words, k=draw.randint(3, 8))
        start = words.index(question[-1])
        answer = [words[(start + step) % len(words)] for step in range(1, draw.randint(10, 20))]
        turns = (("user", question), ("assistant", answer))
        lines.append(json.dumps({"messages": [{"role": role, "content": " ".join(text)} for role, text in turns]}))
    path.write_text("\n".join(lines) + "\n")
    return path


def words_of(**options: Any) -> list[str]:
    """Options as on the command line: a list is several words, and None leaves an option out."""
    words = []
    for key, value in options.items():
        if value is not None:
            words += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return words


def extract(*, rank: int = 0, num_processes: int = 1, **options: Any) -> int:
    """Extracts features with options as on the command line."""
    parsed = parse_arguments(words_of(**options), OPTION_CLASSES, not_from_file=NOT_FROM_FILE)
    return extract_features(*parsed, rank=rank, num_processes=num_processes)


def assert_greedy_text_is_the_targets(target: Target, heads: DraftHeads) -> None:
    """Of a target of 60 tokens: transformers' own text."""
    prompt, options = random_prompt(7, vocab_size=60), {"max_new_tokens": 16, "do_sample": False}
    expected = target.model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    found = generate(target, heads, prompt, **options)
    assert torch.equal(found.sequences, expected)
    assert found.stats.num_verify_steps > 0


class InterruptedRunError(Exception):
    """Stands for whatever breaks off a run."""


class Runner:
    """Runs training into `output_dir` with options as on the command line."""

    def __init__(self, target_path: Path, conversations: Path, output_dir: Path) -> None:
        self.output_dir = output_dir
        self.defaults: dict[str, Any] = {
            "target": target_path,
            "dataset": conversations,
            "output_dir": output_dir,
            "head_type": "eagle3",
            "choose": False,
            "head_overrides": ["ttt_steps=2", "draft_vocab_size=40"],
            "validation_fraction": 0.25,
            "max_length": 64,
            "num_eval_prompts": 1,
            "eval_max_new_tokens": 4,
            "per_device_train_batch_size": 4,
            "learning_rate": 0.003,
            "max_steps": 8,
            "logging_steps": 1,
            "save_strategy": "no",
            "bf16": False,
            "use_cpu": True,
            "disable_tqdm": True,
            "report": False,
        }

    def arguments(self, **options: Any) -> list[str]:
        return words_of(**{**self.defaults, **options})

    def prepare(self, **options: Any) -> PreparedRun:
        return prepare_run(RunOptions(*parse_arguments(self.arguments(**options))))

    def __call__(self, **options: Any) -> dict[str, float]:
        return self.prepare(**options).finish()

    def break_off(self, step: int, **options: Any) -> None:
        """Trains until `step` optimizer steps have been made, then fails."""
        with pytest.MonkeyPatch.context() as patch:
            interrupt_at_step(step, patch)
            with pytest.raises(InterruptedRunError):
                self(**options)

    def weights(self) -> dict[str, Tensor]:
        return load_file(self.output_dir / "model.safetensors")


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def break_off() -> None:
    raise InterruptedRunError


def interrupt_at_step(step: int, monkeypatch: pytest.MonkeyPatch, interrupt: Callable[[], None] = break_off) -> None:
    """Breaks off training, or does what is given, when `step` optimizer steps have been made."""
    training_step = HeadsTrainer.training_step

    def interrupted(self: HeadsTrainer, *args: Any, **kwargs: Any) -> Tensor:
        if self.state.global_step == step:
            interrupt()
        return training_step(self, *args, **kwargs)

    monkeypatch.setattr(HeadsTrainer, "training_step", interrupted)
