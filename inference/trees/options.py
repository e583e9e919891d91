"""What users write for a tree, and the policy it stands for. The library and the programs share this one parser."""

import re
from collections.abc import Sequence
from pathlib import Path

from draftsmith.inference.trees.candidates import CandidateTrees, gamma_chain
from draftsmith.inference.trees.dynamic import DynamicTree
from draftsmith.inference.trees.policy import TreePolicy
from draftsmith.inference.trees.static import StaticTree, chain

TreeOption = TreePolicy | str | Path | Sequence[Sequence[int]]

FORMS = """\
  auto                         dynamic trees whose size is chosen while decoding, or none (the default)
  dynamic                      EAGLE-2's tree with its usual sizes
  dynamic:DEPTH,TOP_K,NODES    the same with these sizes, root included: dynamic:5,6,24
  chain, chain:LENGTH          the best token, and the best after it, LENGTH times (5)
  gamma, gamma:LENGTH          chains of at most LENGTH (8) tokens, chosen while decoding, or none
  FILE.yaml                    a static tree (configs/trees)
  [[0], [0, 0], [1]]           a static tree as rank paths (in Python)"""


def resolve_policy(tree: TreeOption, max_depth: int | None) -> TreePolicy:
    """The policy that `tree` stands for.

    Args:
        max_depth: the deepest level the drafter proposes; None = any. Dynamic trees are cut to it.

    Raises:
        ValueError: anything that is none of `FORMS` or a `TreePolicy`, and trees deeper than the drafter goes.
    """
    if isinstance(tree, TreePolicy):
        policy: TreePolicy = tree
    elif isinstance(tree, (str, Path)):
        policy = _parse(str(tree), max_depth)
    else:
        policy = StaticTree(tree)
    return policy.limit_depth(max_depth)


def _parse(text: str, max_depth: int | None) -> TreePolicy:
    if text == "auto":
        return CandidateTrees()
    match = re.fullmatch(r"(dynamic|chain|gamma)(?::(\d+(?:,\d+)*))?", text)
    name, sizes = (match[1], [int(size) for size in (match[2] or "").split(",") if size]) if match else ("", [])
    if name == "dynamic" and len(sizes) in (0, 3):
        return DynamicTree(*sizes)
    if name == "chain" and len(sizes) <= 1:
        return chain(*(sizes or [min(5, max_depth or 5)]))
    if name == "gamma" and len(sizes) <= 1:
        return gamma_chain(*sizes)
    if not Path(text).is_file():
        raise ValueError(f"tree is {text!r}, which is neither a file nor one of these forms:\n{FORMS}")
    return StaticTree.from_file(text)
