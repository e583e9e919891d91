"""Target against plain passes: trees, prefill, encoding, masks and what a cache keeps."""

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.inference.cache.kv_cache import Span
from draftsmith.inference.targets.target import Target
from draftsmith.inference.trees.token_tree import TokenTree
from draftsmith.training.features.encoding import encode
from tests.inference.plain_passes import (
    ATOL,
    assert_states_close,
    calm_target,
    compute_depths,
    prefill_in_parts,
    random_tree,
    run_plainly,
)
from tests.params import slow_but
from tests.tiny_targets import (
    CORE_FAMILIES,
    FAMILIES,
    FAMILIES_AND_ATTENTION,
    SLIDING_WINDOW,
    attention_implementations,
    random_prompt,
)

ORDINARY = (*CORE_FAMILIES, "deepseek_v3", "gpt_oss")
BELOW_WINDOW, BEYOND_WINDOW = (1, 3, 4), (9, 14, 21)


def pad_rows(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids [B, L], right-padded with 0, and counts [B]."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return ids, torch.tensor([len(row) for row in rows])


def node_path(tree: TokenTree, row: int, node: int) -> list[int]:
    """Node indices from the root to `node`."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parents[row, node])
    return path


def check_tree(
    model: PreTrainedModel, texts: list[list[int]], tree: TokenTree, logits: Tensor, features: Tensor
) -> None:
    """Every node's logits and features equal those of a plain pass over the text and the node's path."""
    for row, text in enumerate(texts):
        for node in range(tree.num_nodes):
            path = node_path(tree, row, node)
            if path[0] != 0:
                continue  # padding
            output = run_plainly(model, text + tree.token_ids[row, path].tolist())
            torch.testing.assert_close(logits[row, node], output.logits[0, -1], atol=ATOL, rtol=0)
            wanted = torch.cat([output.hidden_states[layer][0, -1] for layer in (2, 0, 6)])
            assert_states_close(features[row, node], wanted)


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param(BELOW_WINDOW, marks=pytest.mark.slow, id="below-window"),
        pytest.param(BEYOND_WINDOW, id="beyond-window"),
    ],
)
# By default the core families, latent attention and sinks with transformers' own choice, and two of them with both:
# `tests/lossless` decodes with all.
@pytest.mark.parametrize(
    ("family", "implementation"),
    slow_but(
        {*(f"{family}-{attention_implementations(family)[0]}" for family in ORDINARY), "llama-eager", "gemma3-eager"},
        {f"{family}-{implementation}": (family, implementation) for family, implementation in FAMILIES_AND_ATTENTION},
    ),
)
def test_tree_verification_equals_plain_passes_after_branching_commits(
    family: str, implementation: str, lengths: tuple[int, ...]
) -> None:
    model = calm_target(family, attn_implementation=implementation)
    target = Target(model)
    generator = torch.Generator().manual_seed(3)
    texts = [random_prompt(length, seed=length)[0].tolist() for length in lengths]
    ids, counts = pad_rows(texts)
    cache = target.new_cache(batch_size=3, capacity=64)
    logits, features = prefill_in_parts(target, cache, ids, counts, 5, feature_layers=(2, 0, 6))
    for row, text in enumerate(texts):
        plain = run_plainly(model, text)
        torch.testing.assert_close(logits[row], plain.logits[0, -1], atol=ATOL, rtol=0)
        wanted = torch.cat([plain.hidden_states[layer][0] for layer in (2, 0, 6)], dim=-1)
        assert_states_close(features[row, : len(text)], wanted)
    for step in range(2):
        tree = random_tree(3, 6, generator, num_padding=2)
        cache.open_slots(tree.num_nodes, Span(min(map(len, texts)), max(map(len, texts))))
        output = target.verify(cache, tree, feature_layers=(2, 0, 6))
        assert output.features is not None
        assert output.logits.isfinite().all()  # padding included
        check_tree(model, texts, tree, output.logits, output.features)
        paths = [node_path(tree, row, node) for row, node in enumerate((3, 5 - step, 3 - step))]
        path, path_counts = pad_rows(paths)
        cache.commit(path, path_counts)
        for row, nodes in enumerate(paths):
            texts[row] += tree.token_ids[row, nodes].tolist()
        assert cache.lengths.tolist() == [len(text) for text in texts]


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_tree_deeper_than_the_window(family: str) -> None:
    """The window counts positions: a node's ancestors may be in slots far before its own position."""
    model = calm_target(family)
    target = Target(model)
    texts = [random_prompt(length, seed=length)[0].tolist() for length in (3, 11)]
    cache = target.new_cache(2, 64)
    target.prefill(cache, *pad_rows(texts))
    depth = SLIDING_WINDOW + 3
    # Two branches side by side: node 2d - 1 and node 2d have depth d.
    parents = torch.tensor([[-1, 0, 0, *range(1, 2 * depth - 1)]]).expand(2, -1)
    token_ids = random_prompt(2 * depth + 1, seed=5, batch_size=2)
    tree = TokenTree(token_ids, parents, compute_depths(parents), torch.zeros(2, 2 * depth + 1))
    assert int(tree.depths.max()) == depth
    cache.open_slots(tree.num_nodes, Span(3, 11))
    output = target.verify(cache, tree, feature_layers=(2, 0, 6))
    assert output.features is not None
    check_tree(model, texts, tree, output.logits, output.features)


# `tests/lossless` and the test above have passes of the others.
@pytest.mark.parametrize("family", slow_but(CORE_FAMILIES, FAMILIES))
def test_encode_equals_the_models_own_hidden_states(family: str) -> None:
    model = calm_target(family)
    target = Target(model)
    rows = [random_prompt(length, seed=length)[0].tolist() for length in (4, 19)]
    ids, counts = pad_rows(rows)
    mask = (torch.arange(ids.shape[1]) < counts[:, None]).long()
    output = encode(target, ids, mask, feature_layers=(1, 3, 6))
    for row, text in enumerate(rows):
        plain = run_plainly(model, text)
        wanted = torch.cat([plain.hidden_states[layer][0] for layer in (1, 3, 6)], dim=-1)
        assert_states_close(output.features[row, : len(text)], wanted)
        assert_states_close(output.last_hidden[row, : len(text)], plain.hidden_states[-1][0])
        logits = target.compute_logits(output.last_hidden[row, : len(text)])
        torch.testing.assert_close(logits, plain.logits[0], atol=ATOL, rtol=0)


def test_encode_feeds_a_graph_and_needs_no_features() -> None:
    """Inference tensors cannot be saved for backward; encode's outputs must be ordinary ones."""
    target = Target(calm_target("llama"))
    output = encode(target, random_prompt(5), torch.ones(1, 5, dtype=torch.long))
    assert output.features.shape == (1, 5, 0)
    layer = nn.Linear(32, 32)
    target.compute_logits(layer(output.last_hidden)).sum().backward()
    assert layer.weight.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in target.model.parameters()), "the target is frozen"


def test_reused_slots_hold_no_trace() -> None:
    """A cache that was used for something longer, then reset, gives what a fresh one gives."""
    target = Target(calm_target("mistral"))
    prompt, counts = random_prompt(10, batch_size=2), torch.tensor([10, 6])
    tree = random_tree(2, 5, torch.Generator().manual_seed(1))
    fresh, used = target.new_cache(2, 64), target.new_cache(2, 64)
    target.prefill(used, random_prompt(40, seed=9, batch_size=2), torch.tensor([40, 40]))
    used.open_slots(8, Span(40, 40))
    target.verify(used, random_tree(2, 8, torch.Generator().manual_seed(2)))
    used.reset()
    for buffer in used._buffers:
        buffer[:, :, :, 20:] = 1e4  # slots that no token of this test reaches
    outputs = []
    for cache in (fresh, used):
        first = target.prefill(cache, prompt, counts).logits
        cache.open_slots(tree.num_nodes, Span(6, 10))
        outputs.append(torch.cat([first, target.verify(cache, tree).logits], dim=1))
    assert outputs[1].isfinite().all()
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-6, rtol=0)
