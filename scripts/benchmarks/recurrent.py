"""The cost of verifying drafts on a target with recurrent layers, beside one with attention only.

    python scripts/benchmarks/recurrent.py --output outputs/recurrent

Builds two random targets of one shape: three recurrent layers (gated delta rule) to each layer of attention, as in
Qwen3-Next and Qwen3.5, and attention in every layer. Both take turns. For each, a table shows the time of a plain step,
and of steps with a chain and with a tree, in plain steps. A step verifies, keeps some nodes, and brings the states to
the last of them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from draftsmith.inference import Target
from draftsmith.inference.cache.tree_cache import TreeCache
from draftsmith.inference.trees.token_tree import TokenTree
from draftsmith.scripts.measuring.environment import describe_machine, describe_program
from draftsmith.scripts.shared.one_line_errors import one_line_errors
from draftsmith.scripts.shared.whole_files import write_text
from draftsmith.training.options.program_parser import ProgramParser

KINDS = {"recurrent": ["linear_attention"] * 3 + ["full_attention"], "attention": ["full_attention"] * 4}


@dataclass
class RecurrentArguments:
    num_layers: int = field(default=12, metadata={"help": "Layers, a multiple of 4."})
    hidden_size: int = field(default=1024, metadata={"help": "Width of the hidden states, a multiple of 256."})
    vocab_size: int = field(default=32000, metadata={"help": "Tokens of the vocabulary."})
    dtype: str = field(default="bfloat16", metadata={"help": "Of the weights: bfloat16 or float32."})
    context: int = field(default=256, metadata={"help": "Tokens in the cache."})
    chain: int = field(default=4, metadata={"help": "Drafted tokens of the chain."})
    tree: str = field(default="3,2,2,1", metadata={"help": "Children of a node at each depth of the tree."})
    num_kept: int = field(default=3, metadata={"help": "Nodes of a step that are kept, the root included."})
    num_rounds: int = field(default=15, metadata={"help": "Measured rounds; a round has every step of both targets."})
    device: str = field(default="cpu", metadata={"help": "Where the targets are."})
    output: str = field(default="outputs/recurrent", metadata={"help": "Folder for the JSON."})

    def __post_init__(self) -> None:
        if self.num_layers % 4 or self.hidden_size % 256:
            raise ValueError("--num_layers must be a multiple of 4, and --hidden_size a multiple of 256")
        self.widths = [int(width) for width in self.tree.split(",")]
        if not 1 <= self.num_kept <= min(self.chain, len(self.widths)) + 1:
            raise ValueError(f"--num_kept is {self.num_kept}: it counts nodes of a path of chain and tree")


def build_target(args: RecurrentArguments, kind: str) -> Target:
    """A random target with the layers of this kind."""
    num_heads = args.hidden_size // 128
    config = Qwen3_5TextConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        layer_types=KINDS[kind] * (args.num_layers // 4),
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        head_dim=128,
        linear_num_key_heads=num_heads,
        linear_num_value_heads=2 * num_heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    return Target(model.to(args.device).eval())


def make_trees(args: RecurrentArguments) -> dict[str, TokenTree]:
    """The tree of each kind of step."""
    shapes = {"plain": [], f"chain of {args.chain}": [1] * args.chain, "tree of": args.widths}
    trees = {}
    for name, widths in shapes.items():
        parents, depths, level = [-1], [0], [0]
        for depth, width in enumerate(widths, start=1):
            parents += [parent for parent in level for _ in range(width)]
            level = list(range(len(depths), len(parents)))
            depths += [depth] * len(level)
        rows = (torch.tensor([numbers], device=args.device) for numbers in (range(len(parents)), parents, depths))
        token_ids, *shape = rows
        tree = TokenTree(token_ids % args.vocab_size, *shape, torch.zeros(1, len(parents), device=args.device))
        trees[f"{name} {len(parents) - 1}" if name == "tree of" else name] = tree
    return trees


def run_step(target: Target, cache: TreeCache, tree: TokenTree, context: int, num_kept: int) -> float:
    """Seconds of one step after `context` tokens. The path is the first one of the tree."""
    cache.lengths.fill_(context)
    cache.length_bound = cache.length_floor = context
    path = [0]
    while len(path) < min(num_kept, tree.num_nodes):
        path.append(int((tree.parents[0] == path[-1]).nonzero()[0]))
    kept = torch.tensor([path], device=cache.lengths.device)
    counts = torch.tensor([len(path)], device=cache.lengths.device)
    start = time.perf_counter()
    cache.open_slots(tree.num_nodes)
    target.verify(cache, tree)
    cache.keep(kept, counts)
    if cache.states is not None:
        cache.states.settle()
    cache.lengths.tolist()  # waits for the device
    return time.perf_counter() - start


def measure(args: RecurrentArguments) -> dict[str, dict[str, list[float]]]:
    """Seconds of every step, by target and by tree."""
    trees = make_trees(args)
    targets = {kind: build_target(args, kind) for kind in KINDS}
    caches = {kind: target.new_cache(1, args.context + 256) for kind, target in targets.items()}
    prompt = torch.arange(args.context, device=args.device)[None] % args.vocab_size
    seconds: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in trees} for kind in KINDS}
    with torch.inference_mode():
        for kind, target in targets.items():
            target.prefill(caches[kind], prompt, torch.full((1,), args.context, device=args.device))
        for number in range(args.num_rounds + 2):  # two to warm up
            for kind, target in targets.items():
                for name, tree in trees.items():
                    taken = run_step(target, caches[kind], tree, args.context, args.num_kept)
                    if number >= 2:
                        seconds[kind][name].append(taken)
    return seconds


def run(args: RecurrentArguments, console: Console) -> dict[str, dict[str, float]]:
    """Measures, prints and stores; returns the median of each step in plain steps of the same round."""
    seconds = measure(args)
    ratios = {
        kind: {
            name: statistics.median(one / plain for one, plain in zip(own, steps["plain"], strict=True))
            for name, own in steps.items()
        }
        for kind, steps in seconds.items()
    }
    table = Table("layers", *(f"{name}" for name in ratios["recurrent"]), title="Steps, in plain steps")
    for kind, steps in ratios.items():
        plain = 1000 * statistics.median(seconds[kind]["plain"])
        table.add_row(kind, f"1 ({plain:.0f} ms)", *(f"{steps[name]:.2f}" for name in list(steps)[1:]))
    console.print(table)
    file = Path(args.output) / "recurrent.json"
    machine = describe_machine(torch.device(args.device)) | describe_program()
    content = {"arguments": asdict(args), **machine, "ratios": ratios, "seconds": seconds}
    write_text(file, json.dumps(content, indent=1))
    console.print(f"wrote {file}")
    return ratios


def main() -> None:
    with one_line_errors("recurrent.py"):
        (args,) = ProgramParser([RecurrentArguments], doc=__doc__).read()
        run(args, Console(width=None if sys.stdout.isatty() else 150))


if __name__ == "__main__":
    main()
