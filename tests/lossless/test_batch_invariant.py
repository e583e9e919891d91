"""Batch-invariant mode: every emitted token's scores equal those of plain decoding, bit by bit, in low precision too.

Legend: B batch, T new tokens, V vocabulary.
"""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.heads import DraftHeads
from draftsmith.inference import Decoder, Drafter, NgramDrafter, Target
from draftsmith.inference.kernels import split_rows
from draftsmith.inference.kernels.packed_weights import PackedLinear
from draftsmith.inference.kernels.split_rows import Rows, find_rows, fix_rows
from draftsmith.inference.runners.compiled import Compiler
from draftsmith.inference.targets.probing import invariance
from draftsmith.inference.targets.probing.invariance import check_compiling, find_difference
from tests.lossless.test_real_heads import TRAINED, chat_prompts, chat_target
from tests.params import slow_but
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, pad_prompts, random_prompt, tiny_target

LENGTHS = (70, 9, 40)
TREES = ("chain:4", "dynamic:4,4,16", "dynamic:5,8,60")
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "seed": [5, 5, 5]}


def decode(target: Any, drafter: Drafter | None, prompts: list[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """The new tokens [B, T], and the scores [B, T, V] that they were chosen by."""
    own = {name: options.pop(name) for name in ("tree", "batch_invariant", "compile") if name in options}
    batch = pad_prompts(prompts)
    keeping = {"return_dict_in_generate": True, "output_logits": True}
    output = Decoder(target, drafter, **own).generate(**batch, **options, **keeping)
    return output.sequences[:, batch["input_ids"].shape[1] :], torch.stack(output.logits, dim=1)


def is_plain(target: Any, prompts: list[Tensor], tree: str, drafter: Drafter | None = None, **options: Any) -> bool:
    """Whether all tokens and scores of a drafted batch equal those of each row by itself.

    Args:
        drafter: None = one that takes its drafts from the plain text, which goes through all branches of the tree.
    """
    options = {"batch_invariant": True, **options}
    seeds = options.get("seed")
    alone = [
        decode(target, None, [prompt], **options | {"seed": seeds and seeds[row : row + 1]})
        for row, prompt in enumerate(prompts)
    ]
    tokens, scores = (torch.cat(parts) for parts in zip(*alone, strict=True))
    if drafter is None:
        texts = [torch.cat([prompt[0], new]) for prompt, new in zip(prompts, tokens, strict=True)]
        drafter = ScriptedDrafter(
            texts, VOCAB_SIZE, num_candidates=8, feature_layers=(1,), is_strict=options["batch_invariant"]
        )
    found, own_scores = decode(target, drafter, prompts, tree=tree, **options)
    return torch.equal(found, tokens) and torch.equal(own_scores, scores)


def is_plain_in(family: str, dtype: torch.dtype, tree: str, **options: Any) -> bool:
    """`is_plain` for a target of this family."""
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    return is_plain(Target.of(tiny_target(family, dtype=dtype)), prompts, tree, max_new_tokens=28, **options)


@pytest.mark.parametrize(
    ("tree", "options"), [(TREES[0], SAMPLED), (TREES[1], {"do_sample": False}), (TREES[2], SAMPLED)], ids=TREES
)
def test_scores_are_those_of_plain_decoding(tree: str, options: dict[str, Any]) -> None:
    assert is_plain_in("llama", torch.bfloat16, tree, **options)


@pytest.mark.parametrize(
    ("dtype", "family"),
    slow_but(
        {"dtype0-mistral", "dtype1-gemma3"},
        {
            f"dtype{place}-{family}": (dtype, family)
            for place, dtype in enumerate((torch.float16, torch.float32))
            for family in ("mistral", "gemma3")
        },
    ),
)
def test_other_families_and_dtypes(dtype: torch.dtype, family: str) -> None:
    assert is_plain_in(family, dtype, TREES[2], do_sample=False)


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.bfloat16, 32), (torch.bfloat16, 1536), (torch.float32, 256), (torch.float16, 64)]
)
def test_products_have_one_kernel(dtype: torch.dtype, width: int) -> None:
    """In bfloat16, few rows have another kernel in the smallest and in wide layers; in float32, the last rows of their
    number divided by four. Sums of numbers that cancel each other show it."""
    generator = torch.Generator().manual_seed(1)
    layer = nn.Linear(width, 48, bias=False, dtype=dtype)
    few = find_rows(layer, dtype)
    assert few is not None
    half = torch.randn(140, width // 2, generator=generator)
    rows = torch.cat([256 * half, -256 * half], dim=1).to(dtype)
    rows[:, ::7] += torch.randn(rows[:, ::7].shape, generator=generator).to(dtype)
    layer.weight.data = torch.randn(48, width // 2, generator=generator).repeat(1, 2).to(dtype)
    layer.requires_grad_(False)
    expected = fix_rows(layer, dtype, torch.device("cpu")) or layer
    for count in range(few.least, few.most or 140):
        assert torch.equal(layer(rows[:count]), expected(rows)[:count]), count


def test_low_precision_has_the_mode_by_default(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_target("llama", dtype=torch.bfloat16)
    rows = find_rows(model, torch.bfloat16)
    is_free = rows is not None and rows.most is None
    assert Decoder(model).target.is_batch_invariant == is_free
    assert not Decoder(model, batch_invariant=False).target.is_batch_invariant
    assert not Decoder(model, compile=True).target.is_batch_invariant
    assert not Decoder(tiny_target("llama")).target.is_batch_invariant
    assert not caplog.records or not is_free
    mixture = tiny_target("mixtral", dtype=torch.bfloat16)
    assert not Decoder(mixture).target.is_batch_invariant
    assert not caplog.records
    assert not any(Decoder(mixture, NgramDrafter()).target.is_batch_invariant for _ in range(2))
    (said,) = [one.message for one in caplog.records]
    assert said.startswith("drafts may change a text at near-ties of two tokens in bfloat16: an expert of Mixtral")


def test_what_is_asked_for_once_is_no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_target("llama", dtype=torch.bfloat16)
    monkeypatch.setattr(invariance, "find_price", lambda target: "it costs much")
    for choice, expected in ((None, False), (True, True), (None, False)):
        assert Decoder(model, batch_invariant=choice).target.is_batch_invariant == expected


def test_packed_products_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with AMX."""
    monkeypatch.setattr(split_rows, "_find_rows", lambda _, shapes, __: Rows(1, 32 if shapes else None))
    target = Target.of(tiny_target("llama")).with_packed_weights()
    twin = target.batch_invariant()
    packed = [part for part in twin.model.modules() if isinstance(part, PackedLinear)]
    assert packed
    assert {part.matrix.most_rows for part in packed} == {32}


def test_layers_that_are_not_linear() -> None:
    """GPT-2's, whose wide ones have another kernel for one row."""
    size = {"num_hidden_layers": 3, "hidden_size": 384, "num_attention_heads": 6, "initializer_range": 0.2}
    target = Target(tiny_target("gpt2", dtype=torch.bfloat16, **size))
    if find_rows(target.model, target.dtype) is None:
        pytest.skip("products of such layers depend on the number of rows on this CPU, and the mode is refused")
    prompts = [random_prompt(length, seed=length) for length in (30, 9)]
    assert is_plain(target, prompts, TREES[1], max_new_tokens=20, do_sample=False)


def test_scores_differ_without_the_mode() -> None:
    """Or the tests above would show nothing."""
    assert not is_plain_in("llama", torch.float32, TREES[1], batch_invariant=False, do_sample=False)


@pytest.mark.parametrize("options", slow_but({"sampled"}, {"greedy": {"do_sample": False}, "sampled": SAMPLED}))
def test_trained_heads_in_bfloat16(options: dict[str, Any]) -> None:
    target, prompts = chat_target(torch.bfloat16), chat_prompts()[:2]
    heads = DraftHeads.from_pretrained(TRAINED / "mtp")
    settings = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0, **options}
    if options["do_sample"]:
        settings["seed"] = SAMPLED["seed"][: len(prompts)]
    assert is_plain(target, prompts, TREES[1], heads, **settings)


def test_compiled_products_of_tiles_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "find_rows", lambda module, dtype: Rows(16, 32))
    with pytest.raises(ValueError, match="leave compile out"):
        Decoder(tiny_target("llama", dtype=torch.bfloat16), None, batch_invariant=True, compile=True)
    with pytest.raises(ValueError, match="leave compile out"):
        Decoder(Target.of(tiny_target("llama", dtype=torch.bfloat16)).batch_invariant(), None, compile=True)


def test_compiled_steps_are_refused_on_gpus() -> None:
    target = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"compile=True on cuda: .* Leave compile out; graphs=True captures"):
        check_compiling(target)


@pytest.mark.slow  # two graphs for each dtype
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_passes_of_different_widths(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_target("llama", dtype=dtype, hidden_size=256, intermediate_size=704, num_hidden_layers=2)
    rows = find_rows(model, dtype)
    if dtype == torch.bfloat16 and (rows is None or rows.most is not None):
        pytest.skip("compiled products depend on the number of rows on this CPU, and are refused")
    target = Target.of(model).batch_invariant()
    compiler = Compiler([target.model])
    target.verify = compiler.compile(target.verify, is_fixed=True)
    with target.without_autograd(), compiler.active():
        assert find_difference(target) is None
    assert compiler.seconds > 0
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING], "no graph was made in another way"


def test_prompts_in_parts() -> None:
    """A prompt that is read at once leaves the scores of one that is read in turns, with `reuse_cache`."""
    target = Target.of(tiny_target("llama", dtype=torch.bfloat16))
    decoder = Decoder(target, NgramDrafter(), batch_invariant=True)
    settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    turn = torch.cat([decoder.generate(random_prompt(50), **settings).sequences, random_prompt(1, seed=3)], dim=1)
    found = decoder.generate(turn, reuse_cache=True, **settings)
    expected = decode(target, None, [turn], max_new_tokens=8, do_sample=False, batch_invariant=True)
    assert torch.equal(torch.stack(found.logits, dim=1), expected[1])
