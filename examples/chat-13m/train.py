"""Trains the embedded target further on conversations.

    python examples/chat-13m/train.py --dataset YOURS.jsonl.gz --eval_dataset HELD_OUT.jsonl.gz \\
        --output_dir outputs/chat-13m --num_train_epochs 3 --bf16 true --torch_compile true --use_cpu true

Options are those of transformers' TrainingArguments, and the ones below. `--resume_from_checkpoint true` continues an
interrupted run. The result is a model in bfloat16 with its tokenizer.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import datasets
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from inference import Decoder
from inference.targets.layer_groups import tie_layers
from scripts.measuring.measure import load_prompts
from scripts.measuring.texts import share_of_repeated_ngrams
from scripts.shared.model_loading import load_target
from scripts.shared.one_line_errors import one_line_errors
from training.data.conversations import load_conversations
from training.options.program_parser import ProgramParser
from training.run.optimizer import MuonWithAdamW

FOLDER = Path(__file__).resolve().parent


@dataclass
class TargetArguments:
    dataset: str = field(metadata={"help": "Conversations to learn, in any layout that training/train_heads.py reads."})
    eval_dataset: str | None = field(default=None, metadata={"help": "Held-out conversations for the perplexity."})
    model: str = field(default=str(FOLDER), metadata={"help": "The model to continue: a folder or a hub id."})
    row_length: int = field(default=512, metadata={"help": "Tokens of a row; rows are cut from one long text."})
    eval_tokens: int = field(default=32_768, metadata={"help": "Held-out tokens to measure the perplexity on."})
    muon_learning_rate: float = field(default=0.01, metadata={"help": "Muon's rate, for all matrices but embeddings."})
    tied_group_size: int | None = field(
        default=None,
        metadata={"help": "Tie the layers: every group of so many layers gets the weights of the first (SPEED)."},
    )
    early_weight: float = field(
        default=0.5, metadata={"help": "With tied layers: weight of a loss on what leaves the first group."}
    )
    prompts: str = field(
        default="examples/prompts.jsonl", metadata={"help": "Prompts for the share of repeated 4-grams at T = 0."}
    )


def make_rows(path: str, tokenizer: Any, length: int, *, most_tokens: int | None = None) -> datasets.Dataset:
    """Rows of `length` tokens, cut from all conversations one after another; user and assistant text alike."""

    def cut() -> Iterator[dict[str, list[int]]]:
        rest: list[int] = []
        for row in load_conversations([path]):
            messages = json.loads(row["conversation"])["messages"]
            rest += tokenizer(
                tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False
            ).input_ids
            while len(rest) >= length:
                yield {"input_ids": rest[:length]}
                rest = rest[length:]

    rows = datasets.Dataset.from_generator(
        cut, features=datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    )
    return rows if most_tokens is None else rows.select(range(min(len(rows), most_tokens // length)))


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([row["input_ids"] for row in rows])}


class TargetTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """Language modelling; with tied layers also a loss on the first group's prediction, which pipelined decoding
    (SPEED, arXiv 2310.12072) goes on with."""

    def __init__(
        self, *, muon_learning_rate: float, early_layer: int | None = None, early_weight: float = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.muon_learning_rate, self.early_layer, self.early_weight = muon_learning_rate, early_layer, early_weight

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        trained: Any = self.model
        named = ((name.replace("embed_tokens", "embedding"), weight) for name, weight in trained.named_parameters())
        rates: dict[str, Any] = {
            "muon_learning_rate": self.muon_learning_rate,
            "learning_rate": self.args.learning_rate,
        }
        self.optimizer = MuonWithAdamW(named, **rates, weight_decay=self.args.weight_decay)
        return self.optimizer

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any) -> Any:  # type: ignore[override]
        input_ids = inputs["input_ids"]
        has_early = self.early_layer is not None and model.training
        outputs = model(
            input_ids=input_ids, use_cache=False, output_hidden_states=[self.early_layer] if has_early else None
        )
        loss = score_text(outputs.logits, input_ids)
        if has_early:
            trained: Any = self.model
            early = trained.lm_head(trained.model.norm(outputs.hidden_states[self.early_layer]))
            loss = loss + self.early_weight * score_text(early, input_ids)
        return (loss, outputs) if return_outputs else loss

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Writes tied weights once for each layer, since safetensors refuses to share them."""
        weights = self.model.state_dict().items()
        super()._save(output_dir, {name: value.clone() if ".layers." in name else value for name, value in weights})


def score_text(logits: Tensor, input_ids: Tensor) -> Tensor:
    """The mean loss on the next tokens."""
    return cross_entropy(logits[:, :-1].float().flatten(0, 1), input_ids[:, 1:].flatten())


def repeated_4grams(folder: str, prompts: str) -> float:
    """Of a model's greedy texts of up to 128 tokens."""
    target, tokenizer = load_target(folder, keeps_dtype=True)
    decoder = Decoder(target)
    found, _ = load_prompts(Path(prompts), tokenizer, target, num_prompts=None, max_new_tokens=128)
    texts = [
        decoder.generate(prompt.input_ids, max_new_tokens=128).sequences[0, prompt.input_ids.shape[1] :].tolist()
        for prompt in found
    ]
    return share_of_repeated_ngrams(texts)


def main(argv: list[str] | None = None) -> None:
    console = Console()
    with one_line_errors("train.py"):
        args, training = ProgramParser([TargetArguments, TrainingArguments], doc=__doc__).parse_args_into_dataclasses(
            argv
        )
        training.remove_unused_columns = False
        training.label_names = ["input_ids"]
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        # Plain products train short rows faster on a CPU than torch's fused attention.
        attention = {"attn_implementation": "eager"} if training.use_cpu else {}
        model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, **attention)
        if args.tied_group_size is not None:
            tie_layers(model, args.tied_group_size)
        trainer = TargetTrainer(
            model=model,
            args=training,
            train_dataset=make_rows(args.dataset, tokenizer, args.row_length),
            data_collator=collate,
            muon_learning_rate=args.muon_learning_rate,
            early_layer=args.tied_group_size,
            early_weight=args.early_weight,
        )
        resume = training.resume_from_checkpoint
        trainer.train(resume_from_checkpoint={"true": True, "false": None}.get(str(resume), resume))
        if args.eval_dataset is not None:
            held_out = make_rows(args.eval_dataset, tokenizer, args.row_length, most_tokens=args.eval_tokens)
            console.print(f"perplexity {math.exp(trainer.evaluate(held_out)['eval_loss']):.2f}")
        model.to(torch.bfloat16)
        trainer._save(training.output_dir)
        tokenizer.save_pretrained(training.output_dir)
        console.print(f"repeated 4-grams at T = 0: {repeated_4grams(training.output_dir, args.prompts):.0%}")


if __name__ == "__main__":
    main()
