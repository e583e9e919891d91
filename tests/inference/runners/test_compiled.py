"""Compiled steps: the text of the eager ones, no compiling beyond what new shapes need, and what happens where
torch.compile fails."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TemperatureLogitsWarper

from draftsmith.heads import HEAD_TYPES
from draftsmith.inference import Decoder, DynamicTree, StaticTree, Target, chain
from draftsmith.inference.cache.kv_cache import Span
from draftsmith.inference.drafters.base import Drafter
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.drafters.small_model import SmallModelDrafter
from draftsmith.inference.drafters.staged import StagedDrafter
from draftsmith.inference.kernels.attention import GROUPED, STOCK
from draftsmith.inference.runners.compiled import Compiler, compiled_runner, count_graphs
from draftsmith.inference.step import Runner, Step
from draftsmith.inference.targets.model_config import find_attention
from draftsmith.inference.trees.policy import TreePolicy
from draftsmith.inference.trees.token_tree import TokenTree
from tests.heads.tiny_heads import tiny_heads
from tests.inference.drafters.test_small_model import rough_copy
from tests.inference.plain_passes import compute_depths
from tests.inference.tiny_encoder_decoders import tiny_encoder_decoder
from tests.lossless.restless import auto_tree, make_restless, restless
from tests.params import slow_but
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_multimodal import tiny_multimodal
from tests.tiny_targets import VOCAB_SIZE, pad_prompts, random_prompt, tiny_target

# torch's compiler warns about parts of torch itself.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 3},
}


@pytest.fixture(scope="module", autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target("llama", num_hidden_layers=2))


class HostDrafter(ScriptedDrafter):
    """Its scripts are Python: only what surrounds it is compiled."""

    extend = torch._dynamo.disable(ScriptedDrafter.extend)
    expand = torch._dynamo.disable(ScriptedDrafter.expand)


@pytest.mark.slow
def test_compiled_text_is_the_eager_text(target: Target) -> None:
    prompt, options = random_prompt(12), {"max_new_tokens": 60, "do_sample": False}
    expected = Decoder(target).generate(prompt, **options).sequences
    drafter = HostDrafter([expected[0]], VOCAB_SIZE)
    output = Decoder(target, drafter, tree=DynamicTree(3, 3, 8), compile=True).generate(prompt, **options)
    assert output.sequences.tolist() == expected.tolist()
    assert min(output.stats.accepted_histogram) > 0, "not every depth was reached"


DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    **{kind: partial(tiny_heads, kind) for kind in HEAD_TYPES},
    # Each level runs another block: a graph of its own.
    "mtp, blocks of their own": partial(tiny_heads, "mtp", num_steps=3, share_block=False),
    "block, confident": partial(
        tiny_heads, "block", block_size=4, markov_rank=5, has_confidence=True, confidence_threshold=0.1
    ),
    "small model": lambda target: SmallModelDrafter(rough_copy(target.model)),
    "staged": lambda target: StagedDrafter(SmallModelDrafter(rough_copy(target.model))),
}


@pytest.mark.slow
def test_compiled_heads_draft_what_they_draft_eagerly(target: Target) -> None:
    check_compiled_drafter(target, "eagle3")


# The target's passes and acceptance, the same for all drafters, are traced by the tests of prompts and of one decoder.
@pytest.mark.usefixtures("traced_alone")
@pytest.mark.parametrize("traced_alone", ["begin_draft|expand_level|draft_ranks"], indirect=True, ids=[""])
@pytest.mark.parametrize("kind", slow_but({"hydra", "mtp", "block"}, list(DRAFTERS)))
def test_every_drafter_is_traced_whole(target: Target, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "draftsmith.inference.runners.compiled")
    check_compiled_drafter(target, kind)
    is_whole = kind != "staged"  # what it guesses decides which passes run: it drafts eagerly
    assert ("could not compile" not in "".join(caplog.messages)) == is_whole


def check_compiled_drafter(target: Target, kind: str) -> None:
    drafter, prompt = DRAFTERS[kind](target), random_prompt(6).repeat(1, 2)
    tree = chain(3) if drafter.drafts_chains_only else DynamicTree(3, 2, 6)
    compiled, eager = (Decoder(target, drafter, tree=tree, compile=flag) for flag in (True, False))
    one, other = (decoder.generate(prompt, max_new_tokens=40, **SETTINGS["sampled"]) for decoder in (compiled, eager))
    assert one.sequences.tolist() == other.sequences.tolist()
    assert one.stats.accepted_histogram == other.stats.accepted_histogram
    assert one.stats.seconds["compile"] > 0


@pytest.mark.usefixtures("traced_alone")
@pytest.mark.parametrize("traced_alone", ["(?!verify|commit)"], indirect=True, ids=[""])
@pytest.mark.parametrize(
    ("rule", "tree"),
    slow_but(
        {"rejection"},
        {"rejection": ("rejection", StaticTree([[0], [1], [0, 0]])), "typical": ("typical", DynamicTree(2, 2, 5))},
    ),
)
def test_compiled_rules_accept_what_they_accept_eagerly(rule: str, tree: Any, caplog: pytest.LogCaptureFixture) -> None:
    """In one graph each, also with a processor that reads the text."""
    caplog.set_level("INFO", "draftsmith.inference.runners.compiled")
    target = Target(tiny_target("llama", num_hidden_layers=2))
    heads = tiny_heads("medusa", target)
    compiled, eager = (Decoder(target, heads, tree=tree, acceptance=rule, compile=flag) for flag in (True, False))
    settings = {"max_new_tokens": 24, "do_sample": True, "temperature": 2.0, "top_p": 0.9, "seed": 3}
    for options in (settings, settings | {"repetition_penalty": 1.2}):
        one, other = (decoder.generate(random_prompt(6, batch_size=2), **options) for decoder in (compiled, eager))
        assert one.sequences.tolist() == other.sequences.tolist()
        assert one.stats.accepted_histogram == other.stats.accepted_histogram
        assert sum(one.stats.accepted_histogram[1:]) > 0
    assert "could not compile" not in "".join(caplog.messages)


@pytest.mark.usefixtures("traced_alone")
def test_too_many_settings_run_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    """Every temperature makes a graph, and torch allows only so many of one function."""
    compiler, warper = Compiler([nn.Linear(2, 2)]), TemperatureLogitsWarper(0.5)

    def warp(scores: Tensor, warper: TemperatureLogitsWarper) -> Tensor:
        return warper(None, scores)

    with compiler.active(), torch._dynamo.config.patch(recompile_limit=2):
        for temperature in (0.5, 0.25, 0.75, 1.5, 0.5):
            warper.temperature = temperature
            found = compiler.compile(warp, is_fixed=True)(torch.ones(1, 3), warper)
            assert torch.equal(found, torch.full((1, 3), 1.0) / temperature)
    assert "now runs eagerly" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("first", [5, 100])
def test_windows_of_any_length_share_one_graph(first: int) -> None:
    """Whether the first pass is within the window, where its view is the whole view, or far beyond it."""
    layer_types = ["sliding_attention", "full_attention"]
    target = Target(tiny_target("gemma3", num_hidden_layers=2, layer_types=layer_types))
    step = Step(target, None, None, runner=compiled_runner([target.model]))
    cache = step.new_state(2, 256, 256).cache
    for buffer in cache._buffers:
        buffer.normal_(generator=torch.Generator().manual_seed(0))
    parents = torch.tensor([[-1, 0, 0, 1]] * 2)
    tree = TokenTree(random_prompt(4, batch_size=2), parents, compute_depths(parents), torch.zeros(2, 4))
    numbers = []
    with step.active(), torch.no_grad():
        for length in (first, 5, 70, 75, 130, 201):
            cache.lengths.copy_(torch.tensor([length, length - 2]))
            logits = step.verify(cache, tree, Span(length - 2, length)).logits
            numbers.append(count_graphs())
            torch.testing.assert_close(logits, target.verify(cache, tree).logits, atol=1e-3, rtol=0)
    assert len(set(numbers)) == 1


def test_an_eager_step_is_as_wide_as_its_tree(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as wide as the largest tree that could have been chosen."""
    decoder, planner = restless(target, NgramDrafter())
    draft, widths = decoder.step.runner.draft, set()

    def record(step: Step, state: Any, policy: TreePolicy, *args: Any) -> Any:
        tree, noise = draft(step, state, policy, *args)
        widths.add((policy.max_depth, tree.path_width, noise.shape[1]))
        return tree, noise

    monkeypatch.setattr(decoder.step, "runner", replace(decoder.step.runner, draft=record))
    decoder.generate(random_prompt(9), max_new_tokens=60, do_sample=True, seed=0)
    assert widths == {(tree.max_depth, 1 + tree.max_depth, 1 + tree.max_depth) for tree in planner.policies[1:] if tree}


def watch_compiled(monkeypatch: pytest.MonkeyPatch, note: Callable[..., None]) -> None:
    """Nothing is compiled; `note` gets the names and arguments of functions that would run compiled."""

    def fake_compile(function: Any, **_: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            note(function.__name__, *args)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(torch, "compile", fake_compile)


@pytest.mark.parametrize("tree", [chain(2), DynamicTree(5, 2, 3), None], ids=["chain", "deeper than its nodes", "all"])
def test_other_numbers_of_waiting_tokens_are_read_eagerly(
    target: Target, monkeypatch: pytest.MonkeyPatch, tree: Any
) -> None:
    """Prompts, and what waits after steps without the drafter: each number would make a graph of its own."""
    widths: list[int] = []

    def note(name: str, *args: Any) -> None:
        if name == "begin_draft":
            widths.append(args[3])

    watch_compiled(monkeypatch, note)
    heads = tiny_heads("eagle3", target)
    if tree is not None:
        decoder = Decoder(target, heads, tree=tree, compile=True)
    else:
        decoder, planner = restless(target, heads, compile=True)
    for length in (4, 9):
        output = decoder.generate(random_prompt(length), max_new_tokens=40, do_sample=False)
    assert set(widths) == {decoder.step.path_width}
    if tree is None:
        assert None in planner.taken
        assert len(widths) > 2
    else:
        assert widths[0] == 3
        assert len(widths) >= output.stats.num_verify_steps


@pytest.mark.parametrize(
    ("tree", "acceptance", "name"),
    [
        (chain(3), "exact", "draft_ranks"),
        (chain(3), "rejection", "draft_ranks"),
        ([[0], [1], [0, 0]], "exact", "draft_ranks"),
        (DynamicTree(3, 2, 6), "exact", "expand_level"),
    ],
)
def test_every_level_runs_one_compiled_function(
    target: Target, monkeypatch: pytest.MonkeyPatch, tree: Any, acceptance: str, name: str
) -> None:
    """A graph of the whole draft would hold a packed copy of the weights for each level."""
    called: list[str] = []
    watch_compiled(monkeypatch, lambda name, *_: called.append(name))
    prompt = random_prompt(5)
    expected = Decoder(target).generate(prompt, max_new_tokens=12, do_sample=False).sequences
    heads = tiny_heads("eagle3", target)
    eager, compiled = (
        Decoder(target, heads, tree=tree, acceptance=acceptance, compile=flag).generate(
            prompt, max_new_tokens=12, do_sample=False
        )
        for flag in (False, True)
    )
    assert torch.equal(compiled.sequences, expected)
    assert eager.stats.accepted_histogram == compiled.stats.accepted_histogram
    num_levels = 1 if isinstance(tree, list) else 2
    assert called.count(name) == num_levels * compiled.stats.num_verify_steps
    assert called.count("begin_draft") == compiled.stats.num_verify_steps


@pytest.mark.slow
def test_two_compiled_decoders_keep_their_models_apart(target: Target) -> None:
    """Guards on modules are dropped, and both models have one class and one shape."""
    other = Target(tiny_target("llama", num_hidden_layers=2, seed=1))
    prompt = random_prompt(8)
    texts = {}
    for name, one in (("first", target), ("second", other), ("first again", target)):
        compiled = Decoder(one, compile=True).generate(prompt, max_new_tokens=12, do_sample=False).sequences
        texts[name] = compiled.tolist()
        assert texts[name] == Decoder(one).generate(prompt, max_new_tokens=12, do_sample=False).sequences.tolist()
    assert texts["first"] != texts["second"]
    assert texts["first"] == texts["first again"]


@pytest.mark.usefixtures("traced_alone")
@pytest.mark.parametrize("traced_alone", ["verify"], indirect=True)
@pytest.mark.parametrize("reads_prompts", slow_but({"prompts too"}, {"trees only": False, "prompts too": True}))
def test_decoders_share_the_graphs_of_their_target(reads_prompts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is first: none makes a graph for each of its trees or prompts."""
    monkeypatch.setattr("draftsmith.inference.runners.compiled._prefers_onednn", lambda dtypes: reads_prompts)
    target = Target(tiny_target("llama", num_hidden_layers=2))
    prompts = [random_prompt(8), random_prompt(11)]

    def check(kind: str | None, compiled: bool | Decoder, num_new_graphs: int) -> Decoder:
        """A decoder that decodes as an eager one."""
        heads, found = None if kind is None else tiny_heads(kind, target), []
        before = count_graphs()
        for how in (False, compiled):
            decoder = Decoder(target, heads, tree=auto_tree((1, 2), (4,), 2) if heads else None, compile=how)
            if heads is not None:
                make_restless(decoder)
            found.append([decoder.generate(prompt, max_new_tokens=16, do_sample=False) for prompt in prompts])
        for one, other in zip(*found, strict=True):
            assert one.sequences.tolist() == other.sequences.tolist()
            assert one.stats.accepted_histogram == other.stats.accepted_histogram
        assert count_graphs() - before == num_new_graphs, kind
        assert any(output.stats.seconds["compile"] for output in found[1]) == bool(num_new_graphs)
        return decoder

    first = check("eagle3", True, 2)  # one token and trees
    second = check(None, first, 0)
    for kind in ("medusa", "mtp"):
        check(kind, second, 0)
    check("medusa", check(None, True, 1), 1)
    assert gc.isenabled()
    other = Target(tiny_target("llama", num_hidden_layers=2, seed=1))
    for target_of_it, refused, why in ((target, Decoder(target), "eager steps"), (other, first, "another target")):
        with pytest.raises(ValueError, match=f"compile .*{why}.*: give a compiled decoder"):
            Decoder(target_of_it, compile=refused)


@pytest.mark.usefixtures("traced_alone")
def test_one_compiled_decoder_serves_greedy_and_sampled_calls_and_batches(caplog: pytest.LogCaptureFixture) -> None:
    target = Target(tiny_target("llama", num_hidden_layers=1))
    heads = tiny_heads("medusa", target, num_heads=2)
    compiled, eager = (Decoder(target, heads, tree=DynamicTree(2, 2, 4), compile=flag) for flag in (True, False))
    prompt = random_prompt(6)
    calls: list[tuple[Any, dict[str, Any]]] = [
        (prompt, SETTINGS["greedy"]),
        (prompt, SETTINGS["sampled"]),
        (torch.cat([prompt, random_prompt(6, seed=9)]), SETTINGS["greedy"]),
        (random_prompt(9), SETTINGS["greedy"]),
        (random_prompt(7), SETTINGS["sampled"] | {"seed": 4}),
    ]
    numbers = []
    for ids, settings in calls:
        one, other = (decoder.generate(ids, max_new_tokens=24, **settings) for decoder in (compiled, eager))
        assert one.sequences.tolist() == other.sequences.tolist()
        numbers.append(count_graphs())
    assert numbers[2:] == [numbers[2]] * 3, "neither another prompt nor another seed may make another graph"
    assert "could not compile" not in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("traced_alone")
def test_prompts_share_the_graph_of_trees(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Of any length, alone and in a batch, also with windows; only the pieces that would be graphs of their own are
    read eagerly."""
    monkeypatch.setattr("draftsmith.inference.runners.compiled._prefers_onednn", lambda dtypes: True)
    target = Target(tiny_target("mistral", num_hidden_layers=2))
    compiled = Decoder(target, NgramDrafter(), tree=DynamicTree(3, 2, 6), compile=True)
    prefill, pieces = Target.prefill, []

    def record(target: Target, cache: Any, token_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        pieces.append(token_ids.shape[1])
        return prefill(target, cache, token_ids, *args, **kwargs)

    lengths = (64, 5, 121, 30, 230, 119)
    settings: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    expected = [Decoder(target).generate(random_prompt(n, seed=n), **settings).sequences for n in lengths]
    monkeypatch.setattr(Target, "prefill", record)
    numbers = []
    for length, text in zip(lengths, expected, strict=True):
        assert compiled.generate(random_prompt(length, seed=length), **settings).sequences.tolist() == text.tolist()
        numbers.append(count_graphs())
    assert pieces == [64, 1]
    assert len(set(numbers)) == 1
    start = random_prompt(40)
    prompts = [torch.cat([start, random_prompt(length, seed=length)], dim=1) for length in (30, 119, 5)]
    texts = compiled.generate(**pad_prompts(prompts), **settings).sequences[:, -10:].tolist()
    assert pieces == [64, 1, 40], "the shared beginning is read by one row"
    assert texts == [Decoder(target).generate(prompt, **settings).sequences[0, -10:].tolist() for prompt in prompts]
    assert "could not compile" not in caplog.text


def test_plain_and_batch_invariant_decoders_read_prompts_eagerly(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch-invariant text must not depend on the drafter, and plain decoding has no graph for prompts."""
    monkeypatch.setattr("draftsmith.inference.runners.compiled._prefers_onednn", lambda dtypes: True)
    verifies_prompts = []
    for one, drafter in ((target, NgramDrafter()), (target.batch_invariant(), NgramDrafter()), (target, None)):
        policy = None if drafter is None else chain(3)
        step = Step(one, drafter, policy, runner=compiled_runner([target.model]))
        verifies_prompts.append(step.verifies_prompts)
    assert verifies_prompts == [True, False, False]


@torch.no_grad()
def test_deep_trees_see_all_their_ancestors(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The depth that a decoder with compiled prompts states for all its trees bounds the search for ancestors."""
    monkeypatch.setattr("draftsmith.inference.runners.compiled._prefers_onednn", lambda dtypes: True)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    token_ids = random_prompt(161, seed=2)
    found, short = [], Step(target, NgramDrafter(), chain(3), runner=compiled_runner([target.model]))
    runners = Runner(), compiled_runner([target.model]), compiled_runner([target.model], beside=short)
    for runner in runners:
        step = Step(target, NgramDrafter(), chain(160), runner=runner)
        assert step.verifies_prompts == (runner is not runners[0])
        cache = step.new_state(1, 256, 256).cache
        target.prefill(cache, random_prompt(10, seed=1), torch.tensor([10]))
        tree = TokenTree.from_prompts(token_ids, torch.tensor([161]))
        tree.max_depth = 160
        found.append(step.verify(cache, tree, Span(10, 10)).logits)
    for logits in found[1:]:
        torch.testing.assert_close(logits, found[0])


# Where torch.compile fails.


def add(values: Tensor) -> Tensor:
    values.add_(1)  # a failed try must not have run
    return values


@pytest.mark.parametrize("failures", [1, 2])
def test_a_graph_that_inductor_cannot_make_is_made_another_way(
    failures: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And only once: later calls take that way at once."""
    tries = []

    def compile_badly(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        number = len(tries)
        tries.append(options)

        def run(*args: Any) -> Any:
            if number < failures:
                raise torch._dynamo.exc.BackendCompilerFailed(function, KeyError("buf7"), None)
            return function(*args)

        return run

    monkeypatch.setattr(torch, "compile", compile_badly)
    compiler, values = Compiler([nn.Linear(2, 2)]), torch.zeros(3)
    for expected in (1.0, 2.0):
        assert compiler.compile(add, is_fixed=True)(values).tolist() == [expected] * 3
    assert len(caplog.messages) == failures
    for message, way in zip(caplog.messages, ["is compiled without kernels of its own", "runs eagerly"], strict=False):
        assert f"could not compile add as one graph, and it now {way}" in message
        assert "buf7" in message
    assert all(options["fullgraph"] for options in tries)


def test_what_the_eager_function_raises_is_raised_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a target's that has compiled parts of its own."""

    def fail(values: torch.Tensor) -> torch.Tensor:
        raise torch._dynamo.exc.Unsupported("a part of the target")

    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *args: function(*args))
    compiled = Compiler([nn.Linear(2, 2)]).compile(fail, is_fixed=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a part of the target"):
        compiled(torch.zeros(3))
    assert len(caplog.messages) == 1


def test_the_attention_of_target_and_small_model_is_switched_while_functions_run() -> None:
    """That of language models only: an image encoder has a config of its own, and T5 attends with biases."""
    target, small, other = tiny_target("llama"), tiny_target("qwen2"), tiny_target("llama")
    multimodal, translating = tiny_multimodal("gemma3"), tiny_encoder_decoder("t5")
    compiler = Compiler([target, SmallModelDrafter(small), multimodal, translating])
    switched = [model.config.get_text_config() for model in (target, small, multimodal)]
    kept = [other.config, multimodal.config.vision_config, translating.config]
    before = [config._attn_implementation for config in kept]
    with compiler.active():
        assert [config._attn_implementation for config in switched] == [GROUPED] * 3
        assert [find_attention(model) for model in (target, small, multimodal)] == [STOCK] * 3
        assert [config._attn_implementation for config in kept] == before
    assert [config._attn_implementation for config in switched] == [STOCK] * 3
