"""Encoder-decoder targets: trees are scored as the model's own decoder scores their paths, and texts are transformers'.

`tests/lossless` holds the same for decoder-only targets; here every cell is one with a source.
"""

import copy
import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.heads import create_heads
from draftsmith.inference import Decoder, DynamicTree, StaticTree, Target, TreePolicy, chain, generate
from draftsmith.inference.cache.kv_cache import KVCache, Span
from draftsmith.inference.drafters.base import Drafter
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.drafters.small_model import SmallModelDrafter
from draftsmith.inference.drafters.staged import StagedDrafter
from draftsmith.inference.trees.token_tree import TokenTree
from draftsmith.training.features.encoding import encode
from tests.inference.plain_passes import prefill_in_parts, random_tree
from tests.inference.tiny_encoder_decoders import (
    KINDS,
    LEFT_OUT,
    START,
    VOCAB_SIZE,
    small_model_of,
    source_batch,
    target_of,
    tiny_encoder_decoder,
)
from tests.lossless.near_tie import explain_difference
from tests.params import slow_but
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import tiny_target
from tests.watched_passes import watch_rows

NEW_TOKENS = 40
POLICIES: dict[str, TreePolicy] = {
    "chain": chain(4),
    "static": StaticTree([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]]),
    "dynamic": DynamicTree(depth=4, top_k=4, num_nodes=16),
}
# Positions are told in different ways: a bias by distance in one layer or in all, a table of positions, learned or not.
# Seeds whose greedy text does not soon repeat one token.
CELLS = [("t5", 2), ("t5-v1.1", 0), ("umt5", 2), ("longt5", 0), ("bart", 0), ("pegasus", 1)]
ATTENTIONS = {"longt5": ("eager",)}  # transformers' LongT5 has no sdpa
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
SAMPLED = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "seed": 5}


@functools.cache
def reference(kind: str, seed: int, batch_size: int, *, is_sampled: bool) -> Tensor:
    """Greedy: transformers' own; sampled: plain decoding on our stack."""
    ids, mask = source_batch(batch_size)
    if is_sampled:
        return generate(target_of(kind, seed), None, ids, mask, **SAMPLED).sequences
    return tiny_encoder_decoder(kind, seed).generate(ids, attention_mask=mask, **GREEDY)


def assert_same_text(model: Any, ids: Tensor, mask: Tensor, expected: Tensor, got: Tensor) -> None:
    """Token identity, but for demonstrated near-ties."""
    assert expected.shape == got.shape
    for row in range(len(expected)):
        source = ids[row][mask[row].bool()][None]
        decode = lambda text, **options: model(source, decoder_input_ids=text, **options)  # noqa: B023, E731
        difference = explain_difference(decode, expected[row], got[row])
        assert difference is None or difference[1] < 1e-4, difference


def plain_logits(model: Any, source: Tensor, tokens: list[int]) -> Tensor:
    """The model's own pass over one text of one source, without padding, cache or masks: [T, V]."""
    with torch.no_grad():
        logits: Tensor = model(source[None], decoder_input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def check_tree(model: Any, target: Target, cache: KVCache, tree: TokenTree, sources: list[Tensor], texts: Any) -> None:
    """Every node's logits are those after its path."""
    cache.open_slots(tree.num_nodes, Span(min(map(len, texts)), max(map(len, texts))))
    logits = target.verify(cache, tree).logits
    for row, (source, text) in enumerate(zip(sources, texts, strict=True)):
        for node in range(tree.num_nodes):
            if node and tree.parents[row, node] < 0:
                continue  # padding
            path = [i for i in range(tree.num_nodes) if tree.ancestors[row, node, i]]
            wanted = plain_logits(model, source, [*text, *tree.token_ids[row, path].tolist()])[-1]
            torch.testing.assert_close(logits[row, node], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "attention"),
    slow_but(
        {"t5-sdpa", "bart-eager", "longt5-eager"},  # a bias by distance, a table of positions, and windows
        {
            f"{kind}-{attention}": (kind, attention)
            for kind in KINDS
            if kind not in LEFT_OUT
            for attention in ATTENTIONS.get(kind, ("sdpa", "eager"))
        },
    ),
)
def test_trees_are_scored_as_the_models_own_decoder_does(kind: str, attention: str) -> None:
    """Rows of different lengths and sources, after a commit that moves slots, and again after a selection."""
    target = target_of(kind, 1, attention)
    model, (ids, mask) = target.model, source_batch(3)
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (30, 1, 12)]
    sources = [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)]
    cache = target.new_cache(3, 96)
    target.read_source(cache, target.encode_source(ids, mask))
    padded = torch.tensor([text + [0] * (30 - len(text)) for text in texts])
    last, _ = prefill_in_parts(target, cache, padded, torch.tensor([30, 1, 12]), 16)
    for row, text in enumerate(texts):
        wanted = plain_logits(model, sources[row], text)[-1]
        torch.testing.assert_close(last[row], wanted, atol=1e-4, rtol=1e-4)

    tree = random_tree(3, 8, generator, num_padding=2)
    tree.token_ids.remainder_(VOCAB_SIZE)
    check_tree(model, target, cache, tree, sources, texts)
    paths = [[i for i in range(8) if tree.ancestors[row, node, i]] for row, node in enumerate((7, 6, 0))]
    width = max(map(len, paths))
    cache.commit(torch.tensor([p + [0] * (width - len(p)) for p in paths]), torch.tensor([len(p) for p in paths]))
    texts = [text + tree.token_ids[row, paths[row]].tolist() for row, text in enumerate(texts)]
    tree = random_tree(3, 6, generator)
    tree.token_ids.remainder_(VOCAB_SIZE)
    check_tree(model, target, cache, tree, sources, texts)


@pytest.mark.parametrize("is_sampled", slow_but({"sampled"}, {"greedy": False, "sampled": True}))
@pytest.mark.parametrize(
    ("kind", "seed"),
    slow_but({"t5-v1.1-0", "longt5-0", "bart-0"}, {f"{kind}-{seed}": (kind, seed) for kind, seed in CELLS}),
)
def test_texts_with_the_scripted_drafter(kind: str, seed: int, is_sampled: bool) -> None:
    """Every depth and branch is reached; sampled text is plain decoding's, whatever the batch."""
    target, histogram = target_of(kind, seed), [0] * 5
    for batch_size, policy in zip((1, 2, 5), POLICIES, strict=True):
        ids, mask = source_batch(batch_size)
        expected = reference(kind, seed, batch_size, is_sampled=is_sampled)
        drafter = ScriptedDrafter(list(expected), VOCAB_SIZE, feature_layers=())
        options = SAMPLED if is_sampled else GREEDY
        output = generate(target, drafter, ids, mask, tree=POLICIES[policy], **options)
        assert_same_text(target.model, ids, mask, expected, output.sequences)
        histogram = [a + b for a, b in zip(histogram, output.stats.accepted_histogram + [0] * 5, strict=False)]
        if is_sampled:
            one = reference(kind, seed, 1, is_sampled=True)
            assert torch.equal(output.sequences[:1], one), "a row's text depends on its neighbours"
    assert min(histogram) > 0, f"not every depth was reached: {histogram}"


def test_small_model_drafts_what_it_would_say_itself() -> None:
    """Drafting for itself, it is always right, so it reads its own source and positions rightly."""
    model = tiny_encoder_decoder("t5-v1.1", 2)
    ids, mask = source_batch(5)
    output = generate(
        Target(model), SmallModelDrafter(model), ids, mask, tree=chain(4), **(GREEDY | {"max_new_tokens": 41})
    )
    assert output.stats.accepted_histogram == [0, 0, 0, 0, 40]


@pytest.mark.usefixtures("traced_alone")
@pytest.mark.slow
def test_compiled_texts_share_their_graphs(caplog: pytest.LogCaptureFixture) -> None:
    """Behind the first text, neither a step nor a source of another length makes a graph."""
    caplog.set_level("INFO", "draftsmith.inference.runners.compiled")
    model = tiny_encoder_decoder("t5-v1.1", 0, num_decoder_layers=1)
    small = SmallModelDrafter(tiny_encoder_decoder("t5-v1.1", 0, num_decoder_layers=1, noise=0.1))
    decoder = Decoder(model, small, tree=DynamicTree(2, 2, 5), compile=True)
    long = torch.randint(3, VOCAB_SIZE, (2, 70), generator=torch.Generator().manual_seed(2))
    seconds = []
    for ids, mask in (source_batch(2), (long, torch.ones_like(long)), source_batch(2)):
        expected = model.generate(ids, attention_mask=mask, **GREEDY)
        output = decoder.generate(ids, mask, **GREEDY)
        assert_same_text(model, ids, mask, expected, output.sequences)
        seconds.append(output.stats.seconds["compile"])
    assert seconds[0] > 0
    assert seconds[1:] == [0, 0]
    assert "could not compile" not in "".join(caplog.messages)


def test_left_padded_sources_and_given_decoder_tokens() -> None:
    model = tiny_encoder_decoder("t5", 2)
    ids, mask = source_batch(3, is_left_padded=True)
    given = torch.tensor([[START, 5, 9], [START, 7, 9], [START, 4, 4]])
    expected = model.generate(ids, attention_mask=mask, decoder_input_ids=given, **GREEDY)
    output = generate(target_of("t5", 2), small_model_of("t5", 2), ids, mask, decoder_input_ids=given, **GREEDY)
    assert torch.equal(output.sequences, expected)
    assert torch.equal(output.sequences[:, :3], given)


def test_return_sequences_share_a_source() -> None:
    """Also where processors read the source, of each row its own."""
    ids, mask = source_batch(2)
    options: dict[str, Any] = {"max_new_tokens": 16, "encoder_no_repeat_ngram_size": 1}
    sampled = options | {"do_sample": True, "seed": 3}
    options["encoder_repetition_penalty"] = 1.5  # transformers 5.4 reads it for one row of each source only
    target, drafter = target_of("t5-v1.1"), small_model_of("t5-v1.1", 0)
    output = generate(target, drafter, ids, mask, num_return_sequences=3, **sampled)
    one_each = generate(target, None, ids.repeat_interleave(3, 0), mask.repeat_interleave(3, 0), **sampled)
    assert torch.equal(output.sequences, one_each.sequences)
    expected = target.model.generate(ids, attention_mask=mask, do_sample=False, **options)
    assert torch.equal(generate(target, drafter, ids, mask, do_sample=False, **options).sequences, expected)


def fail_in_the_loop(input_ids: Tensor, scores: Tensor) -> Tensor:
    if input_ids.shape[1] > 3:
        raise RuntimeError("within the loop")
    return scores


def snapshot(model: nn.Module) -> dict[str, Any]:
    """What hangs on every module, by identity."""
    return {name: {key: id(value) for key, value in vars(module).items()} for name, module in model.named_modules()}


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_the_model_stays_as_it_was(kind: str) -> None:
    """Wrapped, decoded with, failed within the loop and within a pass: nothing of the model has changed."""
    model = tiny_encoder_decoder(kind, 1)
    ids, mask = source_batch(2)
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    before = snapshot(model)
    target = Target(model)
    generate(target, NgramDrafter(), ids, mask, **GREEDY)
    with pytest.raises(RuntimeError, match="within the loop"):
        generate(target, None, ids, mask, logits_processor=[fail_in_the_loop], **GREEDY)
    hook = model.lm_head.register_forward_hook(_fail)
    with pytest.raises(RuntimeError, match="within a pass"):
        generate(target, None, ids, mask, **GREEDY)
    hook.remove()
    assert snapshot(model) == before
    assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), expected)
    assert torch.equal(generate(target, None, ids, mask, **GREEDY).sequences, expected)


def _fail(*_: Any) -> None:
    raise RuntimeError("within a pass")


def test_a_copied_target_decodes() -> None:
    target, (ids, mask) = Target(tiny_encoder_decoder("bart", 0)), source_batch(2)
    found, expected = (generate(one, None, ids, mask, **GREEDY).sequences for one in (copy.deepcopy(target), target))
    assert torch.equal(found, expected)


def test_one_target_in_two_threads() -> None:
    """While one thread stands within a pass, others decode with the same target and with the model itself."""
    target, (ids, mask) = target_of("t5", 2), source_batch(2)
    expected = reference("t5", 2, 2, is_sampled=False)
    mine = threading.get_ident()
    others: dict[str, Tensor] = {}

    def decode_meanwhile(*_: Any) -> None:
        if threading.get_ident() != mine or others:
            return
        others["stock"] = torch.empty(0)
        for name, run in (
            ("stock", lambda: target.model.generate(ids, attention_mask=mask, **GREEDY)),
            ("ours", lambda: generate(target, NgramDrafter(), ids, mask, **GREEDY).sequences),
        ):
            thread = threading.Thread(target=lambda name=name, run=run: others.update({name: run()}))
            thread.start()
            thread.join()

    hook = target.model.decoder.block[0].layer[0].layer_norm.register_forward_hook(decode_meanwhile)
    try:
        output = generate(target, NgramDrafter(), ids, mask, **GREEDY)
    finally:
        hook.remove()
    for sequences in (output.sequences, others["stock"], others["ours"]):
        assert torch.equal(sequences, expected)


def test_models_with_hooks_of_accelerate() -> None:
    """Hooks of `device_map` wrap forwards that are bound to the model's own modules."""
    from accelerate import dispatch_model

    for kind, seed in (("t5", 2), ("bart", 0)):
        model = copy.deepcopy(tiny_encoder_decoder(kind, seed))
        dispatch_model(model, {"": "cpu"}, force_hooks=True)
        ids, mask = source_batch(2)
        output = generate(model, NgramDrafter(), ids, mask, **GREEDY)
        assert torch.equal(output.sequences, reference(kind, seed, 2, is_sampled=False))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft_models() -> None:
    """PEFT's generate takes only keyword arguments here."""
    peft = pytest.importorskip("peft", reason="peft is an optional extra")
    config = peft.LoraConfig(target_modules=["q", "v"], init_lora_weights=False, task_type="SEQ_2_SEQ_LM")
    plain = tiny_encoder_decoder("t5")
    model = peft.get_peft_model(copy.deepcopy(plain), config).eval()
    ids, mask = source_batch(5)
    expected = model.generate(input_ids=ids, attention_mask=mask, **GREEDY)
    assert not torch.equal(expected, plain.generate(ids, attention_mask=mask, **GREEDY))
    drafter = SmallModelDrafter(plain)
    output = generate(model, drafter, ids, mask, tree=POLICIES["dynamic"], **GREEDY)
    assert_same_text(model, ids, mask, expected, output.sequences)
    assert output.stats.acceptance_length > 1.0
    with pytest.raises(ValueError, match="adapter_names is not supported"):
        generate(model, drafter, ids, mask, adapter_names=["default"] * 5, **GREEDY)


@pytest.mark.parametrize("drafter", slow_but({"none", "n-grams"}, ["none", "n-grams", "small", "staged"]))
def test_rows_that_have_ended_leave_with_their_sources(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, seed, count = "t5-v1.1", 2, 5
    target = target_of(kind, seed)
    ids, mask = source_batch(count)
    # A token that rows write at different places ends them.
    free = reference(kind, seed, count, is_sampled=True)[:, 1:]
    firsts = {token: (free == token).int().argmax(1)[(free == token).any(1)].tolist() for token in range(VOCAB_SIZE)}
    eos = max(firsts, key=lambda token: len(set(firsts[token])))
    options = {**SAMPLED, "seed": list(range(count)), "eos_token_id": eos, "pad_token_id": 0}
    alone = [
        generate(target, None, ids[row : row + 1, : int(mask[row].sum())], **{**options, "seed": [row]}).sequences[0]
        for row in range(count)
    ]
    widths = watch_rows(monkeypatch)
    small = small_model_of(kind, seed)
    drafters: dict[str, Drafter | None] = {
        "none": None,
        "n-grams": NgramDrafter(),
        "small": small,
        "staged": StagedDrafter(small),
    }
    tree = None if drafter == "none" else chain(3) if drafter == "staged" else POLICIES["dynamic"]
    output = generate(target, drafters[drafter], ids, mask, tree=tree, **options).sequences
    for row, text in enumerate(alone):
        assert torch.equal(output[row, : len(text)], text), f"row {row}"
        assert not output[row, len(text) :].any()
    assert widths[0] == count
    assert len(set(widths)) > 1
    with pytest.raises(ValueError, match="reads a source anew"):
        Decoder(target, None).generate(ids, mask, reuse_cache=True, **GREEDY)


# What is refused.


class CountedPositions(nn.Module):
    """Positions that are counted from the cache and told by nobody."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, width))

    def forward(self, *_: Any, position_ids: Tensor) -> Tensor:
        return self.table[position_ids]  # the decoder's own count


def test_drafters_of_the_other_kind() -> None:
    decoder_only = Target(tiny_target("llama", vocab_size=VOCAB_SIZE))
    small = SmallModelDrafter(decoder_only)
    with pytest.raises(ValueError, match="target is an encoder-decoder"):
        small.for_target(target_of("t5"))
    with pytest.raises(ValueError, match="target is a decoder-only"):
        small_model_of("t5", 2).for_target(decoder_only)


def test_features() -> None:
    """Trained heads, hidden states for them to train on, and any drafter that asks for some."""
    with pytest.raises(ValueError, match="encoder-decoder"):
        create_heads("medusa", target_of("t5")).bind(target_of("t5"))
    with pytest.raises(ValueError, match="SmallModelDrafter"):
        encode(target_of("t5"), torch.tensor([[3, 4]]), torch.ones(1, 2))
    ids, mask = source_batch(1)
    drafter = ScriptedDrafter([torch.tensor([START])], VOCAB_SIZE)
    with pytest.raises(ValueError, match="SmallModelDrafter"):
        generate(target_of("t5"), drafter, ids, mask, **GREEDY)


def test_sources_of_other_tokens() -> None:
    """Padding as well: the encoder looks it up."""
    token = VOCAB_SIZE
    ids, mask = source_batch(2)
    ids[1, 4] = token
    with pytest.raises(ValueError, match=f"token 4 of row 1 .*{token}; .* {VOCAB_SIZE - 1}"):
        generate(target_of("t5"), None, ids, mask, **GREEDY)


def test_positions_that_cannot_be_told() -> None:
    model = copy.deepcopy(tiny_encoder_decoder("bart"))
    model.model.decoder.embed_positions = CountedPositions(model.config.d_model)
    models = [model, *(tiny_encoder_decoder(kind) for kind in ("m2m_100",) if kind not in LEFT_OUT)]
    for one in models:
        with pytest.raises(ValueError, match="positions"):
            Target(one)
