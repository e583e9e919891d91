"""What every kind of heads promises, checked over the registry: a new kind is covered by being registered.

Legend: B batch, L prefix length (the last token is the root), W frontier nodes, C draft vocabulary, F feature width.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from draftsmith.heads import HEAD_TYPES, DraftHeads, DraftStep, create_heads
from draftsmith.heads.modules import layers
from draftsmith.heads.modules.draft_step import count_predicted
from draftsmith.inference import DraftLogits, Target, generate
from draftsmith.training.features.encoding import encode
from tests.heads.tiny_heads import (
    FIRST,
    FIRST_BY_DEFAULT,
    VARIANT_IDS,
    VARIANTS,
    compute_loss,
    encode_for,
    tiny_heads,
)
from tests.params import slow_but
from tests.tiny_targets import CORE_FAMILIES, random_prompt, target_of, tiny_target

every_kind = pytest.mark.parametrize(("head_type", "overrides"), VARIANTS, ids=VARIANT_IDS)
first_of_each_kind = pytest.mark.parametrize(("head_type", "overrides"), FIRST_BY_DEFAULT)
# Each configuration of heads has one family, and each kind as many as it has configurations: what crosses is heads with
# the shapes and norms of a target.
_CROSSED = [(*variant, CORE_FAMILIES[index % len(CORE_FAMILIES)]) for index, variant in enumerate(VARIANTS)]
kinds_and_families = pytest.mark.parametrize(("head_type", "overrides", "family"), _CROSSED, ids=VARIANT_IDS)
LOSSES = ("cross_entropy", "distillation", "1.8*total_variation+0.1*cross_entropy")


def config_of(heads: DraftHeads) -> dict[str, Any]:
    """The config without what transformers notes about a file."""
    notes = ("_name_or_path", "architectures", "dtype", "transformers_version")
    return {key: value for key, value in heads.config.to_dict().items() if key not in notes}


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


class TestIndependenceOfTheTarget:
    @first_of_each_kind
    def test_saved_and_loaded_heads_are_the_same(
        self, head_type: str, overrides: dict[str, Any], tmp_path: Path
    ) -> None:
        target = target_of("qwen3")
        heads = tiny_heads(head_type, target, **overrides)
        heads.save_pretrained(tmp_path / "heads")
        loaded = DraftHeads.from_pretrained(tmp_path / "heads")
        assert type(loaded) is HEAD_TYPES[head_type]
        assert not loaded.training
        assert_same_tensors(heads.state_dict(), loaded.state_dict())
        assert config_of(loaded) == config_of(heads)
        assert loaded.feature_layers == heads.feature_layers
        assert not loaded.wants_token_counts
        prompt = random_prompt(9)
        options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "tree": "dynamic"}
        outputs = [generate(target, each, prompt, **options) for each in (heads, loaded)]
        assert torch.equal(outputs[0].sequences, outputs[1].sequences)
        assert outputs[0].stats.accepted_histogram == outputs[1].stats.accepted_histogram

    @kinds_and_families
    def test_no_tensor_of_the_target_is_saved_or_trained(
        self, head_type: str, overrides: dict[str, Any], family: str, tmp_path: Path
    ) -> None:
        target = target_of(family)
        model, heads = target.model, tiny_heads(head_type, target, **overrides)
        heads.save_pretrained(tmp_path)
        targets_memory = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
        assert not targets_memory & {tensor.untyped_storage().data_ptr() for tensor in heads.state_dict().values()}
        assert not {id(parameter) for parameter in model.parameters()} & {id(p) for p in heads.parameters()}
        with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
            assert set(file.keys()) == set(heads.state_dict())
        counts = set() if heads.token_counts is None else {"token_counts.safetensors"}
        assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"} | counts

    @first_of_each_kind
    def test_the_target_stays_as_it_was(self, head_type: str, overrides: dict[str, Any]) -> None:
        model = tiny_target("llama")
        model.lm_head.weight.requires_grad_(False)
        before, flags = snapshot(model), [parameter.requires_grad for parameter in model.parameters()]
        target = Target(model)
        heads = create_heads(head_type, target, **overrides)
        if heads.wants_token_counts:
            heads.fit_vocabulary(torch.arange(target.vocab_size))
        take_gradients(heads, target, "cross_entropy")
        heads.eval()
        generate(target, heads, random_prompt(9), max_new_tokens=8, do_sample=False)
        assert_same_tensors(before, snapshot(model))
        assert [parameter.requires_grad for parameter in model.parameters()] == flags
        assert all(parameter.grad is None for parameter in model.parameters())


def take_gradients(heads: DraftHeads, target: Target, loss_type: str) -> Tensor:
    """One loss and its backward pass over two rows, one of them padded."""
    input_ids = random_prompt(24, seed=3, batch_size=2)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, 15:] = 0
    loss_mask = attention_mask.clone()
    loss_mask[:, :4] = 0
    states = encode(target, input_ids, attention_mask, feature_layers=heads.feature_layers)
    heads.train().zero_grad()
    torch.manual_seed(0)  # some kinds draw noise, or the slots they learn from
    output = compute_loss(heads, states, input_ids, loss_mask, loss_type=loss_type)
    output.loss.backward()
    return output.loss.detach()


def state_at(step: DraftStep, row: int, slot: int) -> Tensor | None:
    """[D] what the step's head reads at a slot of a row; None when the kind did not draw it."""
    if step.slots is None:
        return step.hidden[row, slot]
    columns = (step.slots[row] == slot).nonzero().flatten().tolist()
    assert len(columns) <= 1
    return step.hidden[row, columns[0]] if columns else None


class TestTraining:
    @kinds_and_families
    def test_unroll_gives_one_step_per_depth(self, head_type: str, overrides: dict[str, Any], family: str) -> None:
        target = target_of(family)
        heads = tiny_heads(head_type, target, **overrides)
        input_ids = random_prompt(11, batch_size=2)
        features = encode_for(heads, input_ids).features
        steps = heads.unroll(features, input_ids)
        assert [step.shift for step in steps] == list(range(2, 2 + len(steps)))
        assert len(steps) == heads.num_unrolled_steps
        assert len(steps) == 1 or not heads.runs_target_layers
        if heads.max_depth is not None:
            assert len(steps) == heads.max_depth
        columns = target.vocab_size if heads.draft_token_ids is None else heads.draft_token_ids.numel()
        for step in steps:
            num_slots = 11 if step.slots is None else step.slots.shape[1]
            assert step.hidden.shape[:2] == (2, num_slots)
            assert step.head(step.hidden).shape == (2, num_slots, columns)
            assert step.head(step.hidden[0, 2]).shape == (columns,)
            assert step.slots is None or step.slots.shape == (2, num_slots)
            assert step.confidence is None or step.confidence.shape == (2, num_slots)
        assert torch.equal(heads(features, input_ids)[-1].hidden, steps[-1].hidden)

    @every_kind
    def test_padding_changes_no_real_position(self, head_type: str, overrides: dict[str, Any]) -> None:
        target = target_of("llama")
        heads = tiny_heads(head_type, target, **overrides)
        input_ids = random_prompt(12, batch_size=2)
        features = torch.randn(2, 12, len(heads.feature_layers) * target.hidden_size)
        loss_mask = torch.ones_like(input_ids)
        steps = heads.unroll_where(features, input_ids, loss_mask)
        garbage = torch.cat([features, 100 * torch.randn(2, 5, features.shape[-1])], dim=1)
        longer_ids, longer_mask = (nn.functional.pad(x, (0, 5), value=v) for x, v in ((input_ids, 1), (loss_mask, 0)))
        padded = heads.unroll_where(garbage, longer_ids, longer_mask)
        for step, other in zip(steps, padded, strict=True):
            for row in range(2):
                for slot in range(12 - step.shift):  # the predicted token is real, and with it every token they read
                    if (found := state_at(other, row, slot)) is not None:
                        torch.testing.assert_close(found, state_at(step, row, slot))

    @every_kind
    def test_what_is_drawn_and_counted_is_what_is_unrolled(self, head_type: str, overrides: dict[str, Any]) -> None:
        """In rows of their own and in a packed batch, of one long and one short document and one without a loss."""
        target = target_of("llama")
        heads = tiny_heads(head_type, target, **overrides).train()
        input_ids, loss_mask = random_prompt(40, batch_size=2), torch.ones(2, 40, dtype=torch.long)
        loss_mask[0, :5], loss_mask[1, :9], loss_mask[1, 13:] = 0, 0, 0
        features = torch.randn(2, 40, len(heads.feature_layers) * target.hidden_size)
        seeds = torch.randint(-(2**63), 2**63 - 1, loss_mask.shape)
        steps = heads.unroll_where(features, input_ids, loss_mask, seeds)
        for step, slots in zip(steps, heads.choose_slots(loss_mask, seeds), strict=True):
            assert (step.slots is None and slots is None) or torch.equal(step.slots, slots)
        documents = (torch.arange(40) >= 11).long().repeat(2, 1)
        for ids in (None, documents):
            steps = heads(features, input_ids, loss_mask=loss_mask, document_ids=ids, token_seeds=seeds)
            expected = [len(step.find_predicted(loss_mask)[0]) for step in steps]
            assert sum(expected) > 0
            assert count_predicted(heads.choose_slots, loss_mask, seeds, ids, num_groups=None).tolist() == expected

    @first_of_each_kind
    def test_heads_learn_after_they_have_decoded(self, head_type: str, overrides: dict[str, Any]) -> None:
        """Decoding runs in inference mode, and what is kept from it must not enter a graph."""
        target = target_of("llama")
        heads = tiny_heads(head_type, target, **overrides)
        expected = take_gradients(heads, target, "distillation")
        again = tiny_heads(head_type, target, **overrides)
        generate(target, again, random_prompt(9), max_new_tokens=8, do_sample=False)
        assert torch.equal(take_gradients(again, target, "distillation"), expected)

    @kinds_and_families
    def test_every_parameter_learns(self, head_type: str, overrides: dict[str, Any], family: str) -> None:
        target = target_of(family)
        heads = tiny_heads(head_type, target, **overrides)
        loss_type = LOSSES[VARIANTS.index((head_type, overrides)) % len(LOSSES)]
        assert take_gradients(heads, target, loss_type).isfinite()
        for name, parameter in heads.named_parameters():
            assert parameter.requires_grad, name
            assert parameter.grad is not None, f"{name} has no gradient"
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().max() > 0, f"the gradient of {name} is zero"

    @pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
    @first_of_each_kind
    def test_recomputed_states_give_the_same_gradients(self, head_type: str, overrides: dict[str, Any]) -> None:
        """In less memory, for kinds with decoder layers; the others refuse it by name."""
        target = target_of("llama")
        heads = tiny_heads(head_type, target, **overrides).train()
        if not heads.supports_gradient_checkpointing:
            with pytest.raises(ValueError, match=f"{type(heads).__name__} does not support"):
                heads.gradient_checkpointing_enable()
            return
        found = []
        for _ in range(2):
            kept: dict[int, int] = {}
            with torch.autograd.graph.saved_tensors_hooks(
                lambda x, kept=kept: (
                    kept.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) and x
                ),
                lambda x: x,
            ):
                take_gradients(heads, target, "cross_entropy")
            gradients = {name: p.grad for name, p in heads.named_parameters() if p.requires_grad}
            found.append((gradients, sum(kept.values())))
            heads.zero_grad()
            heads.gradient_checkpointing_enable()
        (whole, memory), (again, less) = found
        assert_same_tensors(whole, again)
        assert less < memory


class Prefix:
    """Rows of accepted tokens of different lengths with the target's features. The scores after a drafted path must
    equal those of a whole unroll over the row's own tokens.

    Features are made up, unless drafted tokens have features too, which come from the target's layers.
    """

    def __init__(self, heads: DraftHeads, lengths: list[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        width = len(heads.feature_layers) * heads.target.hidden_size
        self.heads = heads
        self.lengths = lengths
        shape = (len(lengths), max(lengths))
        self.token_ids = torch.randint(2, heads.target.vocab_size, shape, generator=generator)
        self.features = torch.randn(*shape, width, generator=generator)
        if heads.runs_target_layers:
            self.features = encode_for(heads, self.token_ids).features

    def start(self, max_length: int, num_scratch: int) -> Any:
        state = self.heads.start(len(self.lengths), max_length, num_scratch)
        self.cache = self.heads.target.new_cache(len(self.lengths), max_length + num_scratch + 1)
        if self.heads.shares_target_cache:
            self.heads.share_cache(state, self.cache)
        return state

    @property
    def counts(self) -> Tensor:
        """Slots of each row: all its tokens but the root have a feature."""
        return torch.tensor(self.lengths) - 1

    def expected(self, row: int, path: list[int]) -> Tensor:
        """[C] scores of the children of the node at the end of `path` (token ids after the root)."""
        length = self.lengths[row]
        ahead = torch.tensor([*path, 1], dtype=torch.long)  # the last one stands for the token that is predicted
        input_ids = torch.cat([self.token_ids[row, :length], ahead])[None]
        features = torch.full((1, input_ids.shape[1], self.features.shape[-1]), 50.0)  # of the root on: not known yet
        features[0, : length - 1] = self.features[row, : length - 1]
        if self.heads.runs_target_layers:
            features = encode_for(self.heads, input_ids).features
        loss_mask = torch.zeros_like(input_ids)
        loss_mask[0, length] = 1
        steps = self.heads.unroll_where(features, input_ids, loss_mask)
        last = min(len(path), len(steps) - 1)
        state = state_at(steps[last], 0, length - 2 + len(path) - last)
        return steps[last].score(state)

    def extend(self, state: Any, starts: list[int], ends: list[int]) -> Tensor:
        """Hands over slots starts[b] to ends[b] of every row, in parts, as decoding does: all rows end in the last
        part. Returns scores [B, C] of the root's children."""
        if self.heads.runs_target_layers:  # the target has written the accepted tokens over the draft
            self.cache.reset()
            self.heads.target.prefill(self.cache, self.token_ids[:, : max(ends)], torch.tensor(ends))
        longest = max(max(end - start for start, end in zip(starts, ends, strict=True)), 1)
        for left in reversed(range(0, longest, layers.PREFILL_CHUNK)):
            stops = [max(start, end - left) for start, end in zip(starts, ends, strict=True)]
            draft = self._extend(state, starts, stops, max(ends))
            starts = stops
        assert draft.logits.shape[:2] == (len(starts), 1)
        return self.scores_of(draft)[:, 0]

    def _extend(self, state: Any, starts: list[int], ends: list[int], max_slots: int) -> DraftLogits:
        width = max(max(end - start for start, end in zip(starts, ends, strict=True)), 1)
        features = torch.full((len(starts), width, self.features.shape[-1]), 70.0)
        token_ids = torch.ones(len(starts), width, dtype=torch.long)
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            features[row, : end - start] = self.features[row, start:end]
            token_ids[row, : end - start] = self.token_ids[row, start + 1 : end + 1]
        return self.heads.extend(
            state, features, token_ids, torch.tensor(ends) - torch.tensor(starts), max_slots=max_slots
        )

    def scores_of(self, draft: DraftLogits) -> Tensor:
        """[B, W, C] of all tokens that the heads score, also where they draft a few of them."""
        if draft.token_ids is None or draft.token_ids.dim() == 1:
            assert draft.token_ids is None or torch.equal(draft.token_ids, self.heads.draft_token_ids)
            return draft.logits
        every = draft.logits.new_full((*draft.logits.shape[:2], self.heads.target.vocab_size), float("-inf"))
        return every.scatter(-1, draft.token_ids, draft.logits)


def assert_scores(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def draw_tree(widths: list[int], batch: int, vocab_size: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens and parents [B, W] of each level's frontier; every row has its own, and siblings may share a token."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(2, vocab_size, (batch, width), generator=generator) for width in widths]
    parents = [
        torch.randint(0, before, (batch, width), generator=generator)
        for before, width in zip([1, *widths[:-1]], widths, strict=True)
    ]
    return tokens, parents


def assert_tree_matches(prefix: Prefix, state: Any) -> None:
    """Drafts a tree with several frontier nodes a level, and compares each node's scores with its own path's unroll."""
    heads = prefix.heads
    depth = len(heads.unroll(torch.zeros(1, 8, prefix.features.shape[-1]), random_prompt(8))) - 1
    widths = [3, 4, 1, 5, 2, 3] if heads.runs_target_layers else [3, 4, 1, 5, 2, 3][:depth]
    batch = len(prefix.lengths)
    tokens, parents = draw_tree(widths, batch, heads.target.vocab_size, seed=1)
    paths: list[list[list[int]]] = [[[]] for _ in range(batch)]
    for level, (ids, above) in enumerate(zip(tokens, parents, strict=True)):
        logits = prefix.scores_of(heads.expand(state, ids, above, level + 1))
        assert logits.shape[1] in (1, ids.shape[1])
        paths = [
            [[*paths[row][above[row, node]], int(ids[row, node])] for node in range(ids.shape[1])]
            for row in range(batch)
        ]
        for row in range(batch):
            for node, path in enumerate(paths[row]):
                assert_scores(logits[row, min(node, logits.shape[1] - 1)], prefix.expected(row, path))


class TestDrafting:
    @pytest.fixture(autouse=True)
    def _no_gradients(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    @every_kind
    def test_a_branching_tree_equals_each_paths_unroll(self, head_type: str, overrides: dict[str, Any]) -> None:
        heads = tiny_heads(head_type, target_of("llama"), **overrides)
        prefix = Prefix(heads, [9, 3, 14])
        state = prefix.start(32, 32)
        found = prefix.extend(state, [0, 0, 0], prefix.counts.tolist())
        for row in range(3):
            assert_scores(found[row], prefix.expected(row, []))
        assert_tree_matches(prefix, state)

    @first_of_each_kind
    def test_long_prompts_are_read_in_chunks(self, head_type: str, overrides: dict[str, Any]) -> None:
        target = target_of("llama", max_position_embeddings=1024)
        heads = tiny_heads(head_type, target, **overrides)
        prefix = Prefix(heads, [601, 514, 3])
        state = prefix.start(640, 32)
        found = prefix.extend(state, [0, 0, 0], prefix.counts.tolist())
        tokens, parents = draw_tree([2], 3, heads.target.vocab_size, seed=4)
        below = prefix.scores_of(heads.expand(state, tokens[0], parents[0], 1))
        for row in range(3):
            assert_scores(found[row], prefix.expected(row, []))
            assert_scores(below[row, -1], prefix.expected(row, tokens[0][row, -1:].tolist()))


@pytest.mark.parametrize(
    ("head_type", "overrides"),
    [("eagle3", {"num_layers": 2}), ("block", {"block_size": 4}), ("parallel", {}), ("mtp", {})],
)
def test_a_window_keeps_its_slots_in_a_ring(
    head_type: str, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts much longer than window and chunk, rows of different lengths, and copies of a shorter part of them."""
    monkeypatch.setattr("draftsmith.heads.modules.layers.PREFILL_CHUNK", 4)
    heads = tiny_heads(head_type, target_of("llama"), sliding_window=6, **overrides)
    prefix = Prefix(heads, [41, 17, 30])
    with torch.no_grad():
        state = prefix.start(64, 32)
        for starts, ends in (([0, 0, 0], [20, 5, 26]), ([20, 5, 26], [37, 15, 28]), ([37, 15, 28], [40, 16, 29])):
            found = prefix.extend(state, starts, ends)
        for row in range(3):
            assert_scores(found[row], prefix.expected(row, []))
        assert_tree_matches(prefix, state)
        caches = state.caches
        assert all(cache.keys.shape[2] == cache.num_scratch + 6 + 4 + 1 for cache in caches)

        # Parts of rows 2 and 0: what the ring has lost is not seen.
        kept = [27, 39]
        copied = heads.start(2, 64, 32)
        copied.copy_rows(state, torch.tensor([2, 0]), torch.tensor(kept), max_slots=40)
        assert [cache.begins.tolist() for cache in copied.caches] == [[21, 30]] * len(caches)
        short = heads.start(1, 64, 32)
        short.copy_rows(state, torch.tensor([0]), torch.tensor([10]), max_slots=10)
        assert [cache.begins.tolist() for cache in short.caches] == [[10]] * len(caches)
        part = Prefix(heads, [30, 41])
        part.token_ids, part.features = prefix.token_ids[[2, 0]], prefix.features[[2, 0]]
        found = part.extend(copied, kept, [29, 40])
        assert_scores(found[0], prefix.expected(2, []))
        assert_scores(found[1], prefix.expected(0, []))


STATIC_TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


@cache
def greedy_text_of(family: str, num_new: int) -> Tensor:
    """transformers' own, after the same prompt each time."""
    prompt = random_prompt(12)
    return target_of(family).model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_new, do_sample=False
    )


class TestDecoding:
    @pytest.mark.parametrize(
        ("head_type", "overrides", "family"),
        slow_but(FIRST, dict(zip(VARIANT_IDS, _CROSSED, strict=True))),
    )
    def test_greedy_text_is_the_targets_own(self, head_type: str, overrides: dict[str, Any], family: str) -> None:
        target, prompt = target_of(family), random_prompt(12)
        expected = greedy_text_of(family, 12)
        heads = tiny_heads(head_type, target, **overrides)
        for tree in (STATIC_TREE, "dynamic"):
            output = generate(target, heads, prompt, tree=tree, max_new_tokens=12, do_sample=False)
            assert torch.equal(output.sequences, expected)

    @first_of_each_kind
    def test_float32_heads_on_a_bfloat16_target(self, head_type: str, overrides: dict[str, Any]) -> None:
        target = target_of("qwen2", dtype=torch.bfloat16)
        model, heads = target.model, tiny_heads(head_type, target, **overrides)
        assert heads.dtype == torch.float32
        prompt = random_prompt(12)
        text = generate(target, heads, prompt, max_new_tokens=20, do_sample=False).sequences
        assert text.shape == (1, 32)
        # Passes of different widths round differently in bfloat16: each token is the best, or ties with it.
        with torch.no_grad():
            logits = model(text).logits[0, 11:-1].float()
        gap = logits.amax(-1) - logits.gather(1, text[0, 12:, None])[:, 0]
        assert gap.max() <= 0.04 * logits.abs().amax()
