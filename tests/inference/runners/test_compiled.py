"""Compiled steps: the text of the eager ones, no compiling beyond what new shapes need, and what happens where
torch.compile fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.inference import Decoder, DynamicTree, StaticTree, Target, chain
from draftsmith.inference.drafters.base import Drafter
from draftsmith.inference.runners.compiled import Compiler, count_graphs
from tests.heads.tiny_heads import tiny_heads
from tests.lossless.restless import auto_tree
from tests.params import slow_but
from tests.scripted_drafter import HostDrafter
from tests.tiny_targets import VOCAB_SIZE, random_prompt, tiny_target

# torch's compiler warns about parts of torch itself.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 3},
    "prefix": {"do_sample": False, "repetition_penalty": 1.3},
}


@pytest.fixture(scope="module", autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target("llama", num_hidden_layers=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "name"),
    [(DynamicTree(3, 3, 8), "greedy"), (DynamicTree(3, 3, 8), "sampled"), (chain(3), "prefix")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_compiled_text_is_the_eager_text(target: Target, tree: Any, name: str) -> None:
    prompt = random_prompt(12)
    expected = Decoder(target).generate(prompt, max_new_tokens=60, **SETTINGS[name]).sequences
    drafter = HostDrafter([expected[0]], VOCAB_SIZE)
    output = Decoder(target, drafter, tree=tree, compile=True).generate(prompt, max_new_tokens=60, **SETTINGS[name])
    assert output.sequences.tolist() == expected.tolist()
    assert min(output.stats.accepted_histogram) > 0, "not every depth was reached"


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.usefixtures("traced_alone")
def test_compiled_trees_of_chosen_sizes(target: Target) -> None:
    settings = SETTINGS["sampled"]
    prompt = random_prompt(12)
    expected = Decoder(target).generate(prompt, max_new_tokens=60, **settings).sequences
    drafter = HostDrafter([expected[0]], VOCAB_SIZE)
    decoder = Decoder(target, drafter, tree=auto_tree((1, 3), (4,), 2), compile=True)
    output = decoder.generate(prompt, max_new_tokens=60, **settings)
    assert output.sequences.tolist() == expected.tolist()
    assert output.stats.num_host_syncs == output.stats.num_verify_steps


DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "mtp": partial(tiny_heads, "mtp"),
    "block": partial(tiny_heads, "block"),
}


# The target's passes and acceptance, the same for all drafters, are traced by the tests of prompts and of one decoder.
@pytest.mark.usefixtures("traced_alone")
@pytest.mark.parametrize("traced_alone", ["begin_draft|expand_level|draft_ranks"], indirect=True, ids=[""])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_drafter_is_traced_whole(target: Target, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "draftsmith.inference.runners.compiled")
    check_compiled_drafter(target, kind)
    assert "as one graph" not in "".join(caplog.messages)


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
        {
            "rejection": ("rejection", StaticTree([[0], [1], [0, 0]])),
            "typical": ("typical", DynamicTree(2, 2, 5)),
        },
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
    assert "as one graph" not in "".join(caplog.messages)


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
def test_one_compiled_decoder_serves_greedy_and_sampled_calls(caplog: pytest.LogCaptureFixture) -> None:
    target = Target(tiny_target("llama", num_hidden_layers=1))
    heads = tiny_heads("medusa", target, num_heads=2)
    compiled, eager = (Decoder(target, heads, tree=DynamicTree(2, 2, 4), compile=flag) for flag in (True, False))
    prompt = random_prompt(6)
    calls: list[tuple[Any, dict[str, Any]]] = [
        (prompt, SETTINGS["greedy"]),
        (prompt, SETTINGS["sampled"]),
        (random_prompt(9), SETTINGS["greedy"]),
        (random_prompt(7), SETTINGS["sampled"] | {"seed": 4}),
    ]
    numbers = []
    for ids, settings in calls:
        one, other = (decoder.generate(ids, max_new_tokens=24, **settings) for decoder in (compiled, eager))
        assert one.sequences.tolist() == other.sequences.tolist()
        numbers.append(count_graphs())
    assert numbers[1:] == [numbers[1]] * 3, "neither another prompt nor another seed may make another graph"
    assert "as one graph" not in caplog.text


# Where torch.compile fails.


def add(values: Tensor) -> Tensor:
    values.add_(1)  # a failed try must not have run
    return values


@pytest.mark.parametrize("failures", [1, 3])
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
    ways = ["compiles it without loops over loops", "compiles it simply", "runs it eagerly"]
    assert len(caplog.messages) == failures
    for message, way in zip(caplog.messages, ways, strict=False):
        assert f"could not compile add as one graph, and now {way}" in message
        assert "buf7" in message
    assert all(options["fullgraph"] for options in tries)
