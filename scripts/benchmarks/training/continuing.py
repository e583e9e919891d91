"""Heads for a fine-tuned target: trained heads continued on it, beside heads that start anew.

    python scripts/benchmarks/training/continuing.py --conversations YOURS.jsonl --output outputs/continuing

Fine-tunes the target on your conversations, lets the fine-tuned target answer their prompts, and trains on the replies:
the old heads on a share of them, new heads on the same share, and new heads on all of them. One table compares the
acceptance with that of the old heads as they are. The last conversations are held out for measuring.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))

import torch
import yaml
from rich.console import Console
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftsmith.heads.modules.host_tensors import read_on_host
from draftsmith.scripts.benchmarks.training import ablation
from draftsmith.scripts.shared.one_line_errors import one_line_errors
from draftsmith.scripts.shared.whole_files import write_text
from draftsmith.training.data.chat_tokens import drop_unusable, tokenize_conversations
from draftsmith.training.data.collation import ConversationCollator
from draftsmith.training.data.conversations import load_conversations
from draftsmith.training.options.program_parser import ProgramParser

REPOSITORY = Path(__file__).resolve().parents[3]
UNCHANGED = "unchanged"  # the run that trains nothing


@dataclass
class ContinuingArguments:
    conversations: str = field(metadata={"help": "JSON lines of conversations, which the fine-tuning learns."})
    target: str = field(default="examples/chat-13m", metadata={"help": "The target to fine-tune."})
    heads: str = field(default="examples/heads/eagle3", metadata={"help": "Heads that were trained for it."})
    config: str = field(
        default="configs/train/eagle3-chat-13m.yaml", metadata={"help": "Training configuration of new heads."}
    )
    num_steps: int = field(default=40, metadata={"help": "Optimizer steps of the fine-tuning."})
    step_size: int = field(default=8, metadata={"help": "Conversations of a step."})
    learning_rate: float = field(default=3e-4, metadata={"help": "AdamW's rate in the fine-tuning."})
    num_replies: int = field(default=600, metadata={"help": "Conversations that the fine-tuned target answers."})
    share: float = field(default=0.1, metadata={"help": "Share of the replies for the short runs."})
    max_length: int = field(default=256, metadata={"help": "Longest conversation in tokens; longer ones are cut."})
    num_prompts: int = field(default=20, metadata={"help": "Held-out prompts to measure acceptance on."})
    max_new_tokens: int = field(default=128, metadata={"help": "Tokens of a reply, and decoded for each prompt."})
    temperature: list[float] = field(
        default_factory=lambda: [0.0], metadata={"help": "Sampling temperatures to measure at; 0 = greedy."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of every draw."})
    output: str = field(default="outputs/continuing", metadata={"help": "Folder for target, data, heads and table."})

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"got --share {self.share}: it is a share of the replies, above 0 and below 1")


def fine_tune(args: ContinuingArguments, conversations: Path, folder: Path) -> float:
    """Trains all weights of the target on conversations, saves it, and returns the last step's loss in nats."""
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    model: Any = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    rows = drop_unusable(
        tokenize_conversations(load_conversations([str(conversations)]), tokenizer, max_length=args.max_length)
    ).shuffle(seed=args.seed)
    collate = ConversationCollator(pad_token_id=tokenizer.pad_token_id or 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    loss = torch.tensor(0.0)
    for step in range(args.num_steps):
        places = [place % len(rows) for place in range(step * args.step_size, (step + 1) * args.step_size)]
        batch = collate([rows[place] for place in places])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch["input_ids"], use_cache=False).logits[:, :-1]
        is_learned = read_on_host(batch["loss_mask"])[:, 1:].bool()
        loss = cross_entropy(logits[is_learned].float(), batch["input_ids"][:, 1:][is_learned])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to(AutoConfig.from_pretrained(args.target).dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return float(loss.detach())


def write_replies(args: ContinuingArguments, target: Path, prompts: Path, output: Path) -> None:
    """Lets the fine-tuned target answer the prompts (`draftsmith data`, which continues after an interruption)."""
    words = ["--target", str(target), "--prompts", str(prompts), "--output", str(output), "--keep_truncated", "true"]
    words += ["--max_new_tokens", str(args.max_new_tokens)]
    words += ["--num_conversations", str(args.num_replies), "--seed", str(args.seed)]
    subprocess.run([sys.executable, str(REPOSITORY / "scripts" / "generate_data.py"), *words], check=True)


def write_configs(args: ContinuingArguments, num_replies: int, folder: Path) -> list[str]:
    """One training configuration for each line of the table."""
    base = {"base": str(Path(args.config).resolve()), "eval_strategy": "no", "save_strategy": "no"}
    base |= {"load_best_model_at_end": False, "validation_fraction": 0.0, "num_eval_prompts": 0, "report": False}
    part = {"max_samples": round(args.share * num_replies)}
    continued = {"init_heads": args.heads, "head_type": None, "head_overrides": {}, "muon_learning_rate": 0.02}
    runs: dict[str, dict[str, Any]] = {
        UNCHANGED: {},
        f"continued-{args.share:.0%}": part | continued,
        f"anew-{args.share:.0%}": part,
        "anew-100%": {"max_samples": num_replies},
    }
    for name, settings in runs.items():
        write_text(folder / f"{name}.yaml", yaml.safe_dump({**base, "seed": args.seed, **settings}))
    return [str(folder / f"{name}.yaml") for name in runs]


def run(args: ContinuingArguments, console: Console) -> dict[str, dict[str, Any]]:
    """Every part that is not there yet, and the table; returns acceptance by run as `ablation.run` does."""
    output = Path(args.output)
    lines = Path(args.conversations).read_text(encoding="utf-8").splitlines(keepends=True)
    if len(lines) <= args.num_prompts:
        raise ValueError(f"{args.conversations} has {len(lines)} conversations: give more than --num_prompts")
    learned, held_out, target, replies = (
        output / name for name in ("learned.jsonl", "held-out.jsonl", "target", "replies.jsonl")
    )
    write_text(learned, "".join(lines[: -args.num_prompts]))
    write_text(held_out, "".join(lines[-args.num_prompts :]))
    if not (target / "tokenizer_config.json").exists():
        console.print(f"fine-tuned {args.target}: loss {fine_tune(args, learned, target):.3f}")
    write_replies(args, target, learned, replies)
    num_replies = len(replies.read_text(encoding="utf-8").splitlines())
    unchanged = output / UNCHANGED
    if not unchanged.exists():
        shutil.copytree(args.heads, unchanged)
    write_text(unchanged / "training_record.json", json.dumps({"training": {}}))
    arguments = ablation.AblationArguments(
        configs=write_configs(args, num_replies, output),
        dataset=str(replies),
        target=str(target),
        prompts=[str(held_out)],
        output=args.output,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
    )
    return ablation.run(arguments, [], console)


def main() -> None:
    with one_line_errors("continuing.py"):
        (args,) = ProgramParser([ContinuingArguments], doc=__doc__).read()
        run(args, Console(width=None if sys.stdout.isatty() else 150))


if __name__ == "__main__":
    main()
