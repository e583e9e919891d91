"""Builds the best static tree for trained heads, from their measured accuracy by depth and rank.

    draftsmith tree --target examples/chat-13m --heads examples/heads/medusa \\
        --dataset examples/conversations.jsonl.gz --num_nodes 24 --output configs/trees/medusa-chat-13m.yaml
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from draftsmith.heads import DraftHeads
from draftsmith.heads.modules.host_tensors import read_on_host, send
from draftsmith.inference import StaticTree
from draftsmith.inference.targets.model_config import find_length_limit
from draftsmith.scripts.shared.model_loading import DTYPE_HELP, DTYPES, load_heads, load_target
from draftsmith.training.data.collation import ConversationCollator
from draftsmith.training.data.options import DataArguments, option, require_positive
from draftsmith.training.data.training_sets import cut_to_limit, load_every_row
from draftsmith.training.features.encoding import encode
from draftsmith.training.losses.teacher import compute_teacher, rows_per_chunk
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


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("draftsmith tree"):
        (args,) = ProgramParser([TreeArguments], doc=__doc__).read(argv)
        build(args)


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


@torch.inference_mode()
def measure_rank_accuracy(heads: DraftHeads, batches: Iterable[dict[str, Tensor]], *, num_ranks: int) -> Tensor:
    """Returns the share of positions where the heads' candidate of rank r at depth d + 1 is the target's own token.

    The path before it consists of the data's tokens. For heads that read the path, the accuracy of a depth is
    conditional on a right parent; for independent heads (Medusa) it is the marginal, as in the paper.

    Args:
        heads: bound to their target.
        batches: of `draftsmith.training.data.collation.ConversationCollator`; only positions of the loss mask count.
        num_ranks: R; ranks beyond the draft vocabulary are never right.

    Returns:
        [K, R] float64.
    """
    target, hits, positions = heads.target, None, None
    for batch in batches:
        input_ids, loss_mask = batch["input_ids"].to(target.device), read_on_host(batch["loss_mask"])
        encoded = encode(target, input_ids, batch["attention_mask"], feature_layers=heads.feature_layers)
        teacher = compute_teacher(
            target, encoded.last_hidden, input_ids, loss_mask, heads.draft_token_ids, loss_type="cross_entropy"
        )
        steps = heads.unroll_where(encoded.features, input_ids, loss_mask)
        if hits is None or positions is None:
            hits = torch.zeros(len(steps), num_ranks, dtype=torch.float64)
            positions = torch.zeros(len(steps), 1, dtype=torch.float64)
        chunk = rows_per_chunk(teacher.num_columns)
        for depth, step in enumerate(steps):
            columns, places = (send(x, target.device) for x in step.find_predicted(loss_mask))
            wanted = teacher.argmax.flatten()[places + step.shift - 1]
            hidden = step.hidden.flatten(0, 1)[columns]
            for start in range(0, len(hidden), chunk):  # the logits of all positions can be gigabytes
                part = slice(start, start + chunk)
                scores, best = step.score(hidden[part]).topk(min(num_ranks, teacher.num_columns), dim=-1)
                is_hit = (best == wanted[part, None]) & ~scores.isneginf()
                hits[depth, : best.shape[-1]] += is_hit.sum(0).double().cpu()
            positions[depth] += wanted.numel()
    if hits is None or positions is None or not positions.all():
        raise ValueError("no position to measure on: give conversations with longer replies")
    return hits / positions


def best_static_tree(accuracy: Sequence[Sequence[float]], num_nodes: int) -> list[list[int]]:
    """The nodes that raise the expected number of accepted tokens most (Medusa, arXiv 2401.10774, section 2.3.3).

    A node's gain is the product of the accuracies along its path. A child never gains more than its parent, so the best
    nodes are a tree.

    Three nodes of two depths: [0] gains 0.6, [0, 0] gains 0.3, [1] gains 0.2.

    >>> best_static_tree([[0.6, 0.2], [0.5, 0.1]], 3)
    [[0], [1], [0, 0]]

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
    main()
