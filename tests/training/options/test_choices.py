"""What `draftsmith train` chooses for a target: from its config and the device's memory, without its weights."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from draftsmith.heads import DraftHeads, create_heads
from draftsmith.heads.formats.registry import PLACES, check_place
from draftsmith.inference import Target
from draftsmith.training.features.target_options import parse_overrides
from draftsmith.training.options.choices import SERVED, Machine, choose_options
from draftsmith.training.options.command_line import parse_arguments
from tests.conftest import needs_muon
from tests.heads.formats.test_native_mtp import name_as_deepseek, random_modules, tiny_mixture, write_checkpoint
from tests.training.runner import Runner, words_of

H100 = Machine("an H100", 80 * 10**9, 1, has_bf16=True)
LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8}
LLAMA_8B = LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
LLAMA_70B = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}


SMALL = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def be(found: Machine) -> None:
        monkeypatch.setattr(Machine, "find", lambda given: found)

    be(H100)
    return be


def choose(target: Path, dataset: Path, overrides: dict[str, Any] | None = None, **given: str) -> dict[str, str]:
    words = {name: [value] for name, value in given.items()}
    choices = choose_options({"target": [str(target)], "dataset": [str(dataset)], **words}, overrides or {})
    choices.tell()
    chosen = {one.name: one.value for one in choices.options}
    return chosen | ({"head_overrides": " ".join(choices.overrides)} if choices.overrides else {})


def write_shape(folder: Path, **shape: Any) -> Path:
    CONFIG_MAPPING["llama"](max_position_embeddings=131072, **shape).save_pretrained(folder)
    return folder


@needs_muon
def test_an_8b_target(machine: Any, tmp_path: Path, conversations: Path) -> None:
    """Rows fit beside the target; the optimizer step has 32,768 tokens on one GPU and on eight."""
    target = write_shape(tmp_path / "8b", **LLAMA_8B)
    expected = {
        "head_type": "eagle3",
        "head_overrides": "draft_vocab_size=32000",
        "learning_rate": "0.00012",
        "muon_learning_rate": "0.02",
        "bf16": "true",
        "target_dtype": "bfloat16",
        "max_length": "4096",
        "packing": "true",
        "per_device_train_batch_size": "4",
        "gradient_accumulation_steps": "2",
        "num_train_epochs": "5",
    }
    assert choose(target, conversations) == expected
    machine(Machine("an H100", 80 * 10**9, 8, has_bf16=True))
    eight = {"per_device_train_batch_size": "1", "gradient_accumulation_steps": "1"}
    assert choose(target, conversations) == expected | eight
    machine(Machine("a small GPU", 32 * 10**9, 1, has_bf16=False))
    found = choose(target, conversations, {"draft_vocab_size": 64000}, max_length="2048", max_steps="9")
    assert (found["bf16"], found["target_dtype"]) == ("false", "float32")
    assert not {"head_overrides", "max_length", "num_train_epochs"} & found.keys()


SMOLLM2 = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        (SMOLLM2, 8192),
        (SMOLLM2 | {"vocab_size": 8000}, None),
        (LLAMA_8B | {"vocab_size": 32000}, None),
        (LLAMA_70B, 32000),  # an LM head of 1.5%, whose scores would fill the memory of training
    ],
    ids=["smollm2", "few-tokens", "llama-2", "70b"],
)
def test_the_draft_vocabulary_follows_the_share_of_the_lm_head(
    machine: Any, tmp_path: Path, conversations: Path, shape: dict[str, Any], size: int | None
) -> None:
    target = write_shape(tmp_path / "t", **shape)
    expected = None if size is None else f"draft_vocab_size={size}"
    assert choose(target, conversations).get("head_overrides") == expected
    assert "head_overrides" not in choose(target, conversations, head_type="mtp")


def test_a_target_that_does_not_fit_on_one_device(
    machine: Any, tmp_path: Path, conversations: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = write_shape(tmp_path / "70b", **LLAMA_70B)
    with caplog.at_level(logging.INFO):
        assert choose(target, conversations)["per_device_train_batch_size"] == "1"
    assert "no row fits beside 141 GB of target (computed)" in caplog.text
    assert "the target's weights take 141 GB, and this process has 80 GB: start one process for each GPU" in caplog.text
    machine(Machine("an H100", 80 * 10**9, 8, has_bf16=True))
    found = choose(target, conversations)
    assert (found["shard_target"], found["per_device_train_batch_size"]) == ("fsdp2", "1")
    assert "shard_target" not in choose(target, conversations, shard_target="fsdp2")


def test_modules_in_the_targets_checkpoint_come_first(
    machine: Any, tmp_path: Path, conversations: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_mixture("glm4_moe", vocab_size=60)
    tensors = name_as_deepseek(random_modules(model, 1), 2)
    target = write_checkpoint(model, tensors, tmp_path / "target")
    found = choose(target, conversations)
    assert (found["init_heads"], found["learning_rate"]) == (str(target), "5e-05")
    assert not {"head_type", "head_overrides", "muon_learning_rate"} & found.keys()
    assert choose(target, conversations, head_type="medusa")["learning_rate"] == "0.002"
    assert choose(target, conversations, init_heads=str(target))["learning_rate"] == "5e-05"
    assert choose(target, conversations, init_heads="elsewhere")["learning_rate"] == "0.002"

    scales = {"model.layers.2.self_attn.q_proj.weight_scale_inv": torch.ones(1)}
    target = write_checkpoint(model, tensors | scales, tmp_path / "quantized")
    with caplog.at_level(logging.INFO):
        assert choose(target, conversations)["head_type"] == "eagle3"
    assert "are quantized, so they are left out" in caplog.text


GELU = {**SMALL, "hidden_act": "gelu_pytorch_tanh"}


@pytest.mark.parametrize(("shape", "place"), [(GELU, None), *((SMALL, place) for place in PLACES)])
def test_chosen_heads_can_be_exported_to_where_they_are_served(
    machine: Any, tmp_path: Path, conversations: Path, shape: dict[str, Any], place: str | None
) -> None:
    folder = write_shape(tmp_path / "t", **shape)
    found = choose(folder, conversations, **({} if place is None else {"served_by": place}))
    overrides = parse_overrides(found.get("head_overrides", "").split())
    target = Target(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval().requires_grad_(False))
    heads = create_heads(found["head_type"], target, **overrides)
    for name in SERVED if place is None else [place]:
        check_place(heads, target, name)
    assert overrides.get("norm_output", True) == (place != "llama.cpp")


def test_heads_that_cannot_go_there_are_refused_at_the_start(
    machine: Any, train: Runner, tmp_path: Path, conversations: Path
) -> None:
    folder = write_shape(tmp_path / "t", **SMALL)
    with pytest.raises(ValueError, match=r"medusa heads .* gguf, which takes eagle3"):
        choose(folder, conversations, head_type="medusa", served_by="llama.cpp")
    for options, message in (
        ({"head_type": "mtp", "served_by": "vllm"}, "--for vllm: .* train eagle3"),
        (
            {"head_type": "block", "served_by": "sglang", "head_overrides": ["mask_token_id=null"]},
            "--for sglang: .*mask was trained.*choose vllm",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            train(**{"head_overrides": None, **options})
    assert not train.output_dir.exists()


def test_a_run_with_nothing_but_a_target_and_data(train: Runner, caplog: pytest.LogCaptureFixture) -> None:
    train.defaults = {name: train.defaults[name] for name in ("target", "dataset", "output_dir", "use_cpu", "report")}
    with caplog.at_level(logging.INFO):
        train(max_steps=2, num_eval_prompts=1, eval_max_new_tokens=4)
    assert "--head_type eagle3: the most published results" in caplog.text
    settings = yaml.safe_load((train.output_dir / "training_config.yaml").read_text())
    assert (settings["head_type"], settings["packing"], settings["max_length"]) == ("eagle3", True, 256)
    assert settings["per_device_train_batch_size"] == 2  # 16 tokens of a step for each of 32 channels, in rows of 256
    assert DraftHeads.from_pretrained(train.output_dir).config.head_type == "eagle3"


@pytest.mark.parametrize("words", [["1"], ["Yes"], ["true"], []])
def test_a_gpu_that_the_run_does_not_use_is_not_counted(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Machine.find({"use_cpu": words}).name == "the CPU"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "t", "--dataset", "d", "--max_length", "2k"], "max_length.*2k"),
        (["--target", "t", "--dataset", "d", "--max_length"], "max_length.*expected one argument"),
        (["--target", "t", "u", "--dataset", "d"], "got 'u', which is no option"),
        (["--target", "t", "--dataset", "d", "--for", "vlm"], "got --for 'vlm': did you mean vllm?"),
        (["--target", "--dataset", "d"], "target.*expected one argument"),
        (["--target"], "target.*expected one argument"),
        (["--choose", "true"], "required: --target"),
        (["--choose", "perhaps"], "choose.*perhaps"),
    ],
)
def test_a_mistake_is_told_before_anything_is_chosen(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_arguments(words)


def test_what_is_given_wins_from_a_file_and_from_the_command_line(
    machine: Any, tmp_path: Path, target_path: Path, conversations: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump({"max_length": 64, "learning_rate": 0.5, "packing": False}))
    words = words_of(target=target_path, dataset=conversations, use_cpu="true", config=config)
    model, data, training, *_ = parse_arguments([*words, "--learning_rate", "0.25", "--no_bf16"])
    assert (model.head_type, data.max_length, data.packing) == ("eagle3", 64, False)
    assert (training.learning_rate, training.bf16) == (0.25, False)
    words += ["--head_type", "medusa", "--head_overrides", "num_heads=2"]
    assert parse_arguments(words)[2].muon_learning_rate is None, "a file that goes with a kind is whole"
    model, data, training, *_ = parse_arguments([*words, "--choose", "true"])
    assert (model.head_type, model.parse_head_overrides(), data.max_length) == ("medusa", {"num_heads": 2}, 64)
    assert training.learning_rate == 0.5
    assert training.num_train_epochs == 5
