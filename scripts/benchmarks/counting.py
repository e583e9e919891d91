"""Targets of random weights that count upwards, and token trees whose drafts are right to a given depth.

The embeddings are large, and row t + 1 of the LM head is the embedding of token t: whatever the layers add, the token
after t is t + 1 (mod V). So the right continuation is known without a table, in every dtype, and everything else of a
step is real work: each layer, product and cache row of the target and of the heads.

Legend: B batch, N tree nodes, D hidden size, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.heads import HEAD_TYPES, DraftHeads, create_heads
from draftsmith.inference import Target
from draftsmith.inference.trees.policy import TreePolicy
from draftsmith.inference.trees.token_tree import TokenTree

# The shapes of Llama-3.2-1B and Llama-3.1-8B, and a toy.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2},
    "1B": {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8},
    "8B": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8},
}  # fmt: skip
DRAFT_VOCABULARY = 32_000  # of EAGLE-3's published heads


def make_counting_target(size: str, dtype: torch.dtype, device: torch.device) -> Target:
    """Embedding and LM head are two tensors, also where the published model has one."""
    fields = {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = LlamaConfig(**SHAPES[size], **fields, max_position_embeddings=8192)
    torch.manual_seed(0)
    with device:
        model: Any = LlamaForCausalLM._from_config(config, dtype=dtype)
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight.normal_()
        model.lm_head.weight.copy_(embeddings.roll(1, 0))
        embeddings.mul_(64)  # above what all layers of an 8B shape add
    return Target(model.requires_grad_(False).eval())


def reduce_vocabulary(kind: str, target: Target) -> dict[str, int]:
    """Overrides for heads that can have a draft vocabulary, where the target's is larger than `DRAFT_VOCABULARY`."""
    has_own = hasattr(HEAD_TYPES[kind].config_class(), "draft_vocab_size")
    return {"draft_vocab_size": DRAFT_VOCABULARY} if has_own and target.vocab_size > DRAFT_VOCABULARY else {}


def make_random_heads(kind: str, target: Target) -> DraftHeads:
    """Heads of one kind as they are before training, in the target's dtype."""
    torch.manual_seed(0)
    heads = create_heads(kind, target, **reduce_vocabulary(kind, target))
    heads.fit_vocabulary(torch.arange(target.vocab_size, device=target.device))
    return heads.to(target.dtype).requires_grad_(False).eval()


def script_tree(tree: TokenTree, num_right: Tensor, vocab_size: int) -> TokenTree:
    """The tree with other tokens and another shape (see `ScriptedTree`).

    Worked example, num_right = 2: after token 7, the drafts 3 and 8 with the children 4 and 9:

        node        0     1     2     3     4
        drafted     7     3     8     4     9
        token_ids   7     8     9     4     9
        parents    -1     0     1     0     0

    In the place of a draft that would be right by chance stands the root's token, which never follows itself.
    """
    nodes = torch.arange(tree.num_nodes, device=tree.token_ids.device)
    root_ids = tree.token_ids[:, :1]
    is_right, is_root = (nodes > 0) & (nodes <= num_right), nodes == 0
    wrong_ids = torch.where(tree.token_ids == (root_ids + 1) % vocab_size, root_ids, tree.token_ids)
    parents = torch.where(is_right, nodes - 1, torch.where(is_root, -1, 0))
    depths = torch.where(is_right, nodes, torch.where(is_root, 0, 1))
    return replace(
        tree,
        token_ids=torch.where(is_right, (root_ids + nodes) % vocab_size, wrong_ids),
        parents=parents.expand_as(tree.parents).contiguous(),
        depths=depths.expand_as(tree.depths).contiguous(),
    )


class ScriptedTree(TreePolicy):
    """Drafts with another policy, then replaces the tree: its first nodes are a chain that a counting target accepts,
    all others are wrong children of the root. Costs are those of the other policy's tree, which has as many nodes.

    Args:
        policy: drafts; its depth is already cut for the drafter.
        vocab_size: V.

    Attributes:
        num_right: [] int64, length of the chain: the drafted tokens that each step accepts. A tensor, so that compiled
            and captured steps read it anew.
    """

    level_functions = ("script_tree",)
    script_tree = staticmethod(script_tree)

    def __init__(self, policy: TreePolicy, vocab_size: int, device: torch.device) -> None:
        self.policy, self.vocab_size = policy, vocab_size
        self.max_depth, self.num_nodes, self.num_scratch = policy.max_depth, policy.num_nodes, policy.num_scratch
        self.num_right = torch.zeros((), dtype=torch.long, device=device)

    @property
    def most_right(self) -> int:
        return min(self.max_depth, self.num_nodes - 1)

    def grow(self, *args: Any) -> TokenTree:
        tree = self.policy.grow(*args)
        scripted = self.script_tree(tree, self.num_right, self.vocab_size)
        scripted.max_depth = tree.max_depth
        return scripted
