"""Texts on a GPU, compared with plain decoding on the same GPU, and what a step may not do there. In float32,
except in batch-invariant mode."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.heads import DraftHeads
from draftsmith.inference import Decoder, DynamicTree, SmallModelDrafter, Target
from draftsmith.inference.engine import Emission, Engine
from draftsmith.inference.step import StepOutput
from draftsmith.scripts.benchmarks.counting import ScriptedTree, make_counting_target, make_random_heads
from tests.conftest import REPOSITORY
from tests.gpu.conftest import KINDS
from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import pad_prompts, random_prompt, tiny_target

TRAINED = REPOSITORY / "examples" / "heads"
TRAINED_KINDS = [kind for kind in KINDS if (TRAINED / kind).is_dir()]
MODES: dict[str, dict[str, bool]] = {"eager": {}, "captured": {"graphs": True}, "compiled": {"compile": True}}
TREE, ACCEPTED, NUM_NEW = DynamicTree(4, 3, 8), 3, 17


def decode_scripted(kind: str, device: torch.device, batch_size: int, **options: Any) -> tuple[Tensor, float]:
    """The text of a target that counts, after prompts of two tokens, and the acceptance length."""
    target = make_counting_target("tiny", torch.float32, device)
    script = ScriptedTree(TREE, target.vocab_size, device)
    script.num_right.fill_(ACCEPTED)
    decoder = Decoder(target, make_random_heads(kind, target), tree=script, **options)
    firsts = 10 + torch.arange(batch_size, device=device)[:, None] * 100
    for _ in range(2):  # graphs are made by the first
        output = decoder.generate(firsts + torch.arange(2, device=device), max_new_tokens=NUM_NEW)
    return output.sequences - firsts, output.stats.acceptance_length


@pytest.mark.parametrize(
    ("mode", "batch_size"),
    [
        *(("eager", 1), ("eager", 4), ("captured", 1), ("captured", 4)),
        pytest.param("compiled", 1, marks=pytest.mark.slow),  # to rehearse it on a CPU; `make gpu` runs it
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_accepted_drafts_of_every_kind(
    kind: str, mode: str, batch_size: int, device: torch.device, request: pytest.FixtureRequest
) -> None:
    if device.type == "cpu" and mode == "captured":
        pytest.skip("CUDA graphs need a GPU")
    if device.type == "cpu" and mode == "compiled":
        request.getfixturevalue("traced_alone")
    text, length = decode_scripted(kind, device, batch_size, **MODES[mode])
    assert text.device.type == device.type
    assert text.tolist() == [list(range(2 + NUM_NEW))] * batch_size
    assert length == 1 + ACCEPTED


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_random_heads_change_no_token(kind: str, do_sample: bool, device: torch.device) -> None:
    target = Target(tiny_target("llama").to(device))
    prompt = random_prompt(12, batch_size=2).to(device)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": do_sample, "seed": 3}
    plain = Decoder(target).generate(prompt, **options).sequences
    drafted = Decoder(target, tiny_heads(kind, target), tree=TREE).generate(prompt, **options).sequences
    assert torch.equal(plain, drafted)


@pytest.mark.parametrize("do_sample", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", TRAINED_KINDS)
def test_trained_heads_change_no_token(
    kind: str, do_sample: bool, device: torch.device, chat_target: PreTrainedModel
) -> None:
    model: Any = chat_target if device.type == "cpu" else deepcopy(chat_target).to(device)
    heads = DraftHeads.from_pretrained(TRAINED / kind, dtype=torch.float32)
    prompt = random_prompt(24, vocab_size=4000).to(device)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": do_sample, "seed": 5, "eos_token_id": None}
    plain = Decoder(model).generate(prompt, **options).sequences
    assert torch.equal(plain, Decoder(model, heads).generate(prompt, **options).sequences)


class Watch:
    """Forbids synchronisation from each read of emitted tokens to the next one. On a CPU it only counts."""

    def __init__(self, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.num_reads = device, 0
        emit, advance = Engine.emit, Engine.advance
        monkeypatch.setattr(Engine, "emit", lambda *args: self._allow(emit, *args))
        monkeypatch.setattr(Engine, "advance", lambda *args: self._forbid(advance, *args))

    def set_mode(self, mode: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode(mode)

    def _allow(self, emit: Callable[..., Emission], engine: Engine, output: StepOutput) -> Emission:
        self.num_reads += 1
        self.set_mode("default")
        return emit(engine, output)

    def _forbid(self, advance: Callable[..., Emission], engine: Engine) -> Emission:
        self.set_mode("error")
        return advance(engine)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_once(
    kind: str, batch_size: int, do_sample: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(tiny_target("llama").to(device))
    decoder = Decoder(target, tiny_heads(kind, target), tree=TREE)
    prompt = random_prompt(12, batch_size=batch_size).to(device)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": do_sample, "seed": 3}
    decoder.generate(prompt, **options)
    watch = Watch(device, monkeypatch)
    try:
        stats = decoder.generate(prompt, **options).stats
    finally:
        watch.set_mode("default")
    assert watch.num_reads == 1 + stats.num_host_syncs == 1 + stats.num_verify_passes


@pytest.mark.parametrize("graphs", [False, True])
def test_batch_invariant_mode_in_bfloat16(graphs: bool, device: torch.device) -> None:
    """Drafted rows of a batch have the scores of plain decoding, each row by itself, bit by bit."""
    if graphs and device.type == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    model = tiny_target("llama", dtype=torch.bfloat16).to(device)
    target = Target(model).batch_invariant()
    settings: dict[str, Any] = {"max_new_tokens": NUM_NEW, "return_dict_in_generate": True, "output_logits": True}
    prompts = [random_prompt(length, seed=length).to(device) for length in (9, 70, 200)]
    expected = [Decoder(target).generate(prompt, do_sample=False, **settings) for prompt in prompts]
    decoder = Decoder(target, SmallModelDrafter(model), tree=TREE, graphs=graphs)
    found = decoder.generate(**pad_prompts(prompts), do_sample=False, **settings)
    assert found.stats.acceptance_length > 2
    for row, alone in enumerate(expected):
        assert torch.equal(found.sequences[row, -NUM_NEW:], alone.sequences[0, -NUM_NEW:])
        assert torch.equal(torch.stack(found.logits)[:, row], torch.stack(alone.logits)[:, 0])
