"""How well `tree="auto"` chooses, apart from the clock: recorded acceptance and measured costs, replayed.

    python scripts/replay_planner.py --target examples/chat-13m --heads examples/heads/eagle3 \\
        --prompts examples/prompts.jsonl --dtype bfloat16 --compile --markdown outputs/replay.md

At every token of the target's own text, the largest tree is drafted once and told what each smaller one would have
accepted. Replayed over these records at this machine's costs (`Decoder.costs`), every fixed tree and plain decoding get
their speeds, and so does a new `TreePlanner`, which sees the texts several times. What planning itself takes, and what
passes cost that find a cold cache, is left out: benchmark.py measures it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_measure import Prompt, load_prompts
from model_loading import DTYPES, load_heads, load_target
from rich.progress import track
from table_program import run_table_program

from inference import Decoder, Target
from inference.auto_tree import AutoTree
from inference.cost_model import CostModel, Plan
from inference.tree_planner import TreePlanner


@dataclass
class ReplayArguments:
    """Options of replay_planner.py."""

    target: str = field(metadata={"help": "The frozen target: a folder or hub id."})
    heads: list[str] = field(metadata={"help": "Trained heads: folders or hub ids."})
    prompts: list[str] = field(metadata={"help": "Files of prompts or conversations, as for benchmark.py."})
    num_prompts: int | None = field(default=8, metadata={"help": "Of each file; none = all."})
    max_new_tokens: int = field(default=96, metadata={"help": "Of each text."})
    temperature: float = field(default=0.0, metadata={"help": "0 = greedy."})
    dtype: str = field(default="float32", metadata={"help": f"The target's dtype: {', '.join(DTYPES)}."})
    compile: bool = field(default=False, metadata={"help": "Costs of compiled decoding."})
    passes: int = field(default=4, metadata={"help": "How often a planner sees the texts."})
    markdown: str | None = field(default=None, metadata={"help": "A file for the table; it is printed in any case."})

    def __post_init__(self) -> None:
        if self.max_new_tokens < 4 or self.passes < 2 or self.temperature < 0:
            raise ValueError(
                f"got --max_new_tokens {self.max_new_tokens}, --passes {self.passes} and --temperature "
                f"{self.temperature}: give at least 4, at least 2 and at least 0"
            )


@dataclass(frozen=True)
class Record:
    """One place of a text: the drafter's confidence, tokens the largest tree accepted, and each plan's."""

    context: int
    confidence: float
    accepted: int
    counted: list[int]


Text = list[Record | None]


def main(argv: list[str] | None = None) -> int:
    return run_table_program(ReplayArguments, compare, __file__, argv)


def compare(args: ReplayArguments) -> str:
    """A Markdown table: a row for each set of heads and file of prompts; speeds are shares of the best of all."""
    target, tokenizer = load_target(args.target, dtype=args.dtype)
    sample: dict[str, Any] = {"do_sample": False}
    if args.temperature:
        sample = {"do_sample": True, "temperature": args.temperature, "seed": 0}
    lines = [
        "| heads | prompts | best fixed tree (depth, nodes, width) | plain | auto, first pass | auto, later |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for name in args.heads:
        heads = load_heads(name, target)
        costs = Decoder(target, heads, tree="auto", compile=args.compile).costs(do_sample=args.temperature > 0)
        for path in args.prompts:
            prompts, _ = load_prompts(
                Path(path), tokenizer, target, num_prompts=args.num_prompts, max_new_tokens=args.max_new_tokens
            )
            recorder = Decoder(target, heads, tree="auto")
            described = f"{heads.config.head_type}, {Path(path).stem}"
            texts = [
                record(target, recorder, prompt, args.max_new_tokens, sample)
                for prompt in track(prompts, description=described, transient=True)
            ]
            policy = recorder.policy
            assert isinstance(policy, AutoTree)
            lines.append(
                f"| {heads.config.head_type} | {Path(path).stem} | {judge(policy, costs, texts, args.passes)} |"
            )
    return "\n".join(lines)


class _Recorded(Exception):
    """Ends a text after its first step."""


def record(target: Target, decoder: Decoder, prompt: Prompt, max_new_tokens: int, sample: dict[str, Any]) -> Text:
    """What a tree would accept at every place of the target's own text; None where the text ends before it is known."""
    plain = Decoder(target).generate(prompt.input_ids, max_new_tokens=max_new_tokens, **sample).sequences
    length = prompt.input_ids.shape[1]
    text: Text = []
    with recording(decoder) as found:
        for end in range(length, plain.shape[1] - 1):
            found.clear()
            with suppress(_Recorded):
                decoder.generate(plain[:, :end], max_new_tokens=max_new_tokens, **sample)
            text.append(Record(end, *found[0]) if found else None)
    return text


@contextmanager
def recording(decoder: Decoder) -> Iterator[list[Any]]:
    """Inside the block the decoder drafts its largest tree, and stops when it has learned what that brought."""
    found: list[Any] = []
    planner, costs = decoder._planner, decoder.costs
    assert planner is not None

    class Recorder(TreePlanner):
        is_drafting = True  # type: ignore[assignment]

        def choose(self, *_: Any) -> Plan:
            return self.largest

        def learn(self, plan: Plan, confidences: Any, accepted: Any, counted: Any, *_: Any) -> None:
            found.append((confidences[0], accepted[0], list(counted[0])))
            raise _Recorded

    assert isinstance(decoder.policy, AutoTree)
    free = CostModel((1,), (1,), ((1.0,),), 0.0, 0.0, (1,), (0.0,), 0.0, 0.0)
    decoder._planner, decoder.costs = Recorder(decoder.policy), lambda *_, **__: free  # type: ignore[method-assign]
    try:
        yield found
    finally:
        decoder._planner, decoder.costs = planner, costs  # type: ignore[method-assign]


def judge(policy: AutoTree, costs: CostModel, texts: Sequence[Text], passes: int) -> str:
    """The cells of a row behind its names."""
    known = [one for text in texts for one in text if one is not None]
    if not known:
        raise ValueError("no text is long enough to draft in: raise --max_new_tokens, or give other prompts")
    speeds = {plan: replay_fixed(place, plan, costs, texts) for place, plan in enumerate(policy.plans)}
    best = max(speeds, key=lambda plan: speeds[plan])
    plain = len(known) / sum(costs.plain_seconds(one.context) for one in known)
    top = max(plain, speeds[best])
    planner = TreePlanner(policy)
    first, *later = (replay_planner(planner, costs, texts) / top for _ in range(passes))
    cells = (plain / top, first, sum(later) / len(later))
    return f"({best.depth}, {best.num_nodes}, {best.width}) | {' | '.join(f'{cell:.2f}' for cell in cells)}"


def replay_fixed(place: int, plan: Plan, costs: CostModel, texts: Sequence[Text]) -> float:
    """Tokens a second of one plan, the one at `place`, at every step."""
    tokens, seconds = 0, 0.0
    for text in texts:
        at = 0
        while at < len(text):
            if (one := text[at]) is None:
                break
            taken = 1 + one.counted[place]
            tokens, seconds = tokens + min(taken, len(text) - at), seconds + costs.step_seconds(plan, one.context)
            at += taken
    return tokens / seconds


def replay_planner(planner: TreePlanner, costs: CostModel, texts: Sequence[Text]) -> float:
    """Tokens a second of a planner's choices. It learns what the decode loop would tell it, but at once instead of a
    step later, and the clock of every step."""
    places = {plan: place for place, plan in enumerate(planner.plans[1:])}
    tokens, seconds = 0, 0.0
    for text in texts:
        planner.begin_text(costs)
        at = 0
        while at < len(text):
            if (one := text[at]) is None:
                break
            if not planner.is_drafting:
                planner.pass_step()
                spent, taken = costs.plain_seconds(one.context), 1
                planner.learn_plain(costs, one.context, spent)
            else:
                plan = planner.choose(costs, one.context, [one.confidence])
                accepted = one.counted[places[plan]] if plan in places else 0
                spent, taken = costs.step_seconds(plan, one.context), 1 + accepted
                # A tree tells of smaller ones, and of no deeper path than its own.
                counted = [min(number, accepted) for number in one.counted]
                planner.learn(plan, [one.confidence], [accepted], [counted], costs, one.context, spent)
            tokens, seconds = tokens + min(taken, len(text) - at), seconds + spent
            at += taken
    return tokens / seconds


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
