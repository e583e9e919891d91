"""Says why heads accept few drafts: what is wrong, how it shows, what to do.

    draftsmith diagnose --target examples/chat-13m --heads outputs/heads
    draftsmith diagnose --target T --heads H --dataset outputs/replies.jsonl.gz --prompts YOURS.jsonl --html page.html

The target writes a few texts, and the heads draft them, as the decoder and as training does. With the training
conversations it also sees who wrote the replies, what is learned, and which system prompt they have.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import yaml
from torch import Tensor

from draftsmith.inference import Target
from draftsmith.inference.request.chat_template import render_probe
from draftsmith.scripts.conversion.conventions import compare_conventions, question_prompts
from draftsmith.scripts.diagnosis.breakdown import break_down
from draftsmith.scripts.diagnosis.checks import Case, find_faults
from draftsmith.scripts.diagnosis.evidence import gather_evidence
from draftsmith.scripts.diagnosis.page import describe, render_html, render_text
from draftsmith.scripts.diagnosis.speed import measure_speed
from draftsmith.scripts.diagnosis.training_data import TrainingData, read_data, system_of
from draftsmith.scripts.shared.draft_vocabulary import DATA_HELP, SIZE_HELP, DraftVocabulary
from draftsmith.scripts.shared.model_loading import DTYPE_HELP, DTYPES, fit_tree, load_heads, load_target
from draftsmith.training.data.options import option, require_positive
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.options.program_parser import ProgramParser
from draftsmith.training.run.progress import describe_time
from draftsmith.training.synthesis.prompts import encode_prompts, read_prompts, report_rejected
from draftsmith.training.whole_files import write_text

GROUPS = {
    "heads": "target heads draft_vocab_size tree",
    "texts": "dataset prompts num_prompts max_new_tokens",
    "machine": "dtype device speed",
    "output": "html",
}
MAX_LENGTH = 2048  # of a training row, where no training_config.yaml says it
MOST_PROMPTS, FEWEST_PROMPTS = 16, 4
SECONDS = 120.0  # of the whole, if the number of prompts is free
# What the whole takes, in times of a text decoded alone: always, for each prompt, and for each decoder whose speed is
# measured.
FIXED_COST, PROMPT_COST, SPEED_COST = 7.0, 0.6, 4.8
TEXTS_OF_CONVENTIONS, PROMPTS_OF_SPEED = 6, 3


@dataclass
class DiagnoseArguments:
    """Options of `draftsmith diagnose`."""

    target: str = option(help="The target: a folder, a hub id or a GGUF file.")
    heads: str = option(help="Its heads: a folder, a hub id or a GGUF file.")
    dataset: list[str] = option(
        default_factory=list,
        help="The training conversations (files, folders or hub ids); none = those that the heads' "
        "training_config.yaml names, if they are here.",
    )
    prompts: str | None = option(
        default=None,
        help="Prompts like yours: conversations, or JSON lines of {'turns': [...]}; none = those of the training "
        "conversations, or a few questions.",
    )
    num_prompts: int | None = option(
        default=None,
        help=f"Prompts to decode; none = as many as two minutes allow, {FEWEST_PROMPTS} to {MOST_PROMPTS}.",
    )
    max_new_tokens: int = option(default=96, help="Tokens to decode for each prompt, at T = 0 and at T = 1.")
    tree: str | None = option(default=None, help="The tree that you decode with, to compare with the default one.")
    draft_vocab_size: int | None = option(default=None, help=SIZE_HELP)
    draft_vocab_data: list[str] = option(default_factory=list, help=DATA_HELP)
    speed: bool = option(default=True, help="Measure drafting beside plain decoding.")
    html: str | None = option(default=None, help="HTML file to write the page to.")
    dtype: str = option(default="auto", help=DTYPE_HELP, metadata={"choices": list(DTYPES)})
    device: str | None = option(default=None, help="Device; none = cuda if there is one, else cpu.")

    def __post_init__(self) -> None:
        require_positive(self, ("num_prompts", "max_new_tokens"))


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("draftsmith diagnose"):
        (args,) = ProgramParser([DiagnoseArguments], doc=__doc__, groups=GROUPS).read(argv)
        case, tokenizer = examine(args)
        page = describe(case, find_faults(case), break_down(case.evidence, tokenizer))
    print(render_text(page), end="")
    if args.html is not None:
        write_text(Path(args.html), render_html(page))
        print(f"wrote {args.html}")


def examine(args: DiagnoseArguments) -> tuple[Case, Any]:
    """What the checks look at, and the tokenizer."""
    vocabulary = DraftVocabulary.of(args)
    target, tokenizer = load_target(args.target, dtype=args.dtype, device=args.device)
    heads = load_heads(args.heads, target)
    if vocabulary is not None:
        vocabulary.limit(heads, tokenizer)
    view = heads.for_target(target)
    record = _read_optional(Path(args.heads) / "training_record.json", json.loads)
    config = _read_optional(Path(args.heads) / "training_config.yaml", yaml.safe_load)
    data = _find_data(args, config, target, tokenizer)
    prompts, system = _find_prompts(args, data, tokenizer)
    evidence = gather_evidence(
        target,
        view,
        prompts,
        max_new_tokens=args.max_new_tokens,
        choose_number=partial(_choose_number, args, num_prompts=len(prompts)),
    )
    compared = evidence.texts[:TEXTS_OF_CONVENTIONS]
    conventions = compare_conventions(
        heads,
        target,
        [text.ids[None].to(target.device) for text in compared],
        [text.prompt_length for text in compared],
    )
    tree = None if args.tree is None else fit_tree(args.tree, heads.max_depth)
    case = Case(
        view,
        args.target,
        args.heads,
        evidence,
        conventions,
        render_probe(tokenizer),
        record=record,
        scores_all=heads.draft_token_ids is None,
        system=system,
        data=data,
        max_length=config.get("max_length"),
        speed=measure_speed(target, heads, prompts[:PROMPTS_OF_SPEED], max_new_tokens=args.max_new_tokens, tree=tree)
        if args.speed
        else None,
    )
    return case, tokenizer


def _choose_number(args: DiagnoseArguments, seconds: float, *, num_prompts: int) -> int:
    """How many prompts to decode, given the seconds of one alone; says it, and how long the whole takes."""
    fixed = FIXED_COST + SPEED_COST * args.speed * (2 if args.tree is None else 3)
    if args.num_prompts is None:
        allowed = int((SECONDS / seconds - fixed) / PROMPT_COST)
        num_prompts = min(num_prompts, max(FEWEST_PROMPTS, allowed))
    about = describe_time(seconds * (fixed + PROMPT_COST * num_prompts))
    print(f"{num_prompts} prompts of up to {args.max_new_tokens} tokens: about {about} in all ...", file=sys.stderr)
    return num_prompts


def _read_optional(file: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """What a file of the training holds; {} if there is no file."""
    return (parse(file.read_text(encoding="utf-8")) if file.is_file() else None) or {}


def _find_data(args: Any, config: dict[str, Any], target: Target, tokenizer: Any) -> TrainingData | None:
    """The training conversations: those that were given, or those of the record that are still here."""
    if args.dataset and not tokenizer.chat_template:
        raise ValueError(f"got --dataset, and {args.target} has no chat template to write conversations: leave it out")
    dataset = args.dataset or [name for name in config.get("dataset") or [] if Path(name).exists()]
    if not dataset or not tokenizer.chat_template:
        return None
    return read_data(dataset, target, tokenizer, max_length=config.get("max_length") or MAX_LENGTH)


def _find_prompts(args: Any, data: TrainingData | None, tokenizer: Any) -> tuple[list[Tensor], str]:
    """The prompts, [1, L] int64 each, and their system prompt."""
    most = args.num_prompts or MOST_PROMPTS
    if args.prompts is None and (data is None or not data.prompts):
        return question_prompts(tokenizer)[:most], ""
    chosen = data.prompts if args.prompts is None and data is not None else read_prompts(args.prompts)
    rejected: list[str] = []
    encoded = list(islice(encode_prompts(chosen, tokenizer, rejected), most))
    report_rejected(args.prompts or "the training conversations", rejected, num_left=len(encoded))
    systems = [system_of(conversation.given_turns()[0]) for conversation, _ in encoded]
    return [torch.tensor([ids]) for _, ids in encoded], max(set(systems), key=systems.count)


if __name__ == "__main__":
    main()
