"""Builds the best static tree for trained heads, from their measured accuracy by depth and rank.

    draftsmith tree --target examples/chat-13m --heads examples/heads/medusa \\
        --dataset examples/conversations.jsonl.gz --num_nodes 24 --output configs/trees/medusa-chat-13m.yaml
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.utils.data import DataLoader

from draftsmith.inference import StaticTree
from draftsmith.inference.targets.model_config import find_length_limit
from draftsmith.scripts.shared.model_loading import DTYPE_HELP, DTYPES, load_heads, load_target
from draftsmith.training.data.collation import ConversationCollator
from draftsmith.training.data.options import DataArguments, option, require_positive
from draftsmith.training.data.training_sets import cut_to_limit, load_every_row
from draftsmith.training.losses.rank_accuracy import measure_rank_accuracy
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.options.program_parser import ProgramParser
from draftsmith.training.whole_files import write_text


@dataclass
class TreeArguments:
    target: str = option(help="The frozen target: a folder or hub id.")
    heads: str = option(help="Trained heads: a folder or hub id.")
    dataset: list[str] = option(help="Files of conversations, as for training.")
    output: str = option(help="The tree file to write (YAML).")
    num_nodes: int = option(default=24, help="Nodes of the tree, without the root.")
    num_ranks: int = option(default=8, help="Candidates considered at each depth.")
    num_samples: int = option(default=128, help="Conversations to measure on.")
    max_length: int = option(default=384, help="Longest conversation in tokens; longer ones are cut.")
    dtype: str = option(default="auto", help=DTYPE_HELP, metadata={"choices": list(DTYPES)})

    def __post_init__(self) -> None:
        require_positive(self, ("num_nodes", "num_ranks", "num_samples", "max_length"))


def main(argv: list[str] | None = None) -> int:
    with one_line_errors("draftsmith tree"):
        (args,) = ProgramParser([TreeArguments], doc=__doc__).read(argv)
        build(args)
    return 0


def build(args: TreeArguments) -> None:
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    target, tokenizer = load_target(args.target, dtype=args.dtype)
    heads = load_heads(args.heads, target)
    data = DataArguments(dataset=args.dataset, max_samples=args.num_samples, max_length=args.max_length)
    data = cut_to_limit(data, find_length_limit(target.text_config))
    rows = load_every_row(data, tokenizer)
    batches = DataLoader(rows, batch_size=8, collate_fn=ConversationCollator(tokenizer.pad_token_id or 0))
    accuracy = measure_rank_accuracy(heads, batches, num_ranks=args.num_ranks).tolist()
    # One step serves every depth, and a tree of this many nodes is no deeper.
    depths = accuracy * args.num_nodes if heads.runs_target_layers else accuracy
    paths = best_static_tree(depths, args.num_nodes)
    lines = [
        f"# {len(paths)} nodes, {StaticTree(paths).max_depth} deep, from the accuracy of {args.heads} on {args.target}",
        f"# ({len(rows)} conversations of {', '.join(args.dataset)}, cut at {data.max_length} tokens); by draftsmith "
        "tree.",
        "# Accuracy at each depth, rank 0 first:",
        *(f"#   {depth}: {' '.join(f'{value:.3f}' for value in row)}" for depth, row in enumerate(accuracy, start=1)),
        "paths:",
        *(f"  - {path}" for path in paths),
    ]
    write_text(output, "\n".join(lines) + "\n")
    print("\n".join(lines))


def best_static_tree(accuracy: Sequence[Sequence[float]], num_nodes: int) -> list[list[int]]:
    """The nodes that raise the expected number of accepted tokens most (Medusa, arXiv 2401.10774, section 2.3.3).

    A node's gain is the product of the accuracies along its path. A child never gains more than its parent, so the best
    nodes are a tree.

    Worked example: two depths of accuracies [0.6, 0.2] and [0.5, 0.1], three nodes:

        [0] gains 0.6, [0, 0] gains 0.3, [1] gains 0.2

    Args:
        accuracy: [K depths][R ranks] how often the candidate of rank r (0 = best) at depth d + 1 is the target's token,
            given that its parent was.
        num_nodes: drafted nodes of the tree, the root left out.

    Returns:
        rank paths, as `StaticTree` takes them, shortest first; fewer than `num_nodes` when there are no more.
    """
    level: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    drafted: list[tuple[tuple[int, ...], float]] = []
    for row in accuracy:
        children = [((*path, rank), gain * value) for path, gain in level for rank, value in enumerate(row)]
        level = sorted(children, key=lambda node: -node[1])[:num_nodes]
        drafted += level
    best = sorted(drafted, key=lambda node: (-node[1], len(node[0])))[:num_nodes]  # of a tie the parent
    return [list(path) for path, _ in sorted(best, key=lambda node: (len(node[0]), node[0]))]


if __name__ == "__main__":
    sys.exit(main())
