"""Trains the embedded target further on conversations.

    python examples/chat-13m/train.py --dataset YOURS.jsonl.gz --eval_dataset HELD_OUT.jsonl.gz \\
        --output_dir outputs/chat-13m --num_train_epochs 3 --bf16 true --compile_layers true

Options are those of transformers' TrainingArguments, and the ones below. `--resume_from_checkpoint true` continues an
interrupted run. The result is a model in bfloat16 with its tokenizer.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from draftsmith import Decoder
from draftsmith.inference.targets.layer_groups import tie_layers
from draftsmith.inference.targets.model_config import request_states
from draftsmith.scripts.measuring.measure import load_prompts
from draftsmith.scripts.measuring.report import share_of_repeated_ngrams
from draftsmith.scripts.shared.model_loading import load_target
from draftsmith.training.data.conversations import load_conversations
from draftsmith.training.data.options import option
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.options.program_parser import ProgramParser
from draftsmith.training.run.optimizer import MuonWithAdamW

FOLDER = Path(__file__).resolve().parent


@dataclass
class TargetArguments:
    dataset: str = option(help="Conversations to learn, in any layout that draftsmith train reads.")
    eval_dataset: str | None = option(default=None, help="Held-out conversations for the perplexity.")
    model: str = option(default=str(FOLDER), help="The model to continue: a folder or a hub id.")
    row_length: int = option(default=512, help="Tokens of a row; rows are cut from one long text.")
    eval_tokens: int = option(default=32_768, help="Held-out tokens to measure the perplexity on.")
    muon_learning_rate: float = option(default=0.01, help="Muon's rate, for all matrices but embeddings.")
    tied_group_size: int | None = option(
        default=None, help="Tie the layers: every group of so many layers gets the weights of the first (SPEED)."
    )
    compile_layers: bool = option(
        default=False, help="Compile the layers: one graph for all, ready sooner than --torch_compile's."
    )
    early_weight: float = option(default=0.5, help="With tied layers: weight of a loss on what leaves the first group.")
    unlikelihood: float = option(
        default=0.0, help="Weight of a loss on repeated 4-grams in the model's own greedy texts (their mean)."
    )
    own_texts: int = option(default=2048, help="Greedy texts that the model writes at a time.")
    own_texts_steps: int = option(default=50, help="Steps after which it writes new ones.")
    prompts: str = option(default="examples/prompts.jsonl", help="Prompts for the share of repeated 4-grams at T = 0.")

    def __post_init__(self) -> None:
        if self.row_length < 2 or self.unlikelihood < 0 or min(self.own_texts, self.own_texts_steps) < 1:
            raise ValueError(
                f"got --row_length {self.row_length} --unlikelihood {self.unlikelihood:g} --own_texts {self.own_texts} "
                f"--own_texts_steps {self.own_texts_steps}: give rows of 2 tokens or more, a weight of 0 or more, and "
                "1 or more of the others"
            )
        if self.compile_layers and self.tied_group_size is not None:
            raise ValueError(
                "got --compile_layers with --tied_group_size, whose loss reads a state inside the model: leave one out"
            )


def make_rows(path: str, tokenizer: Any, length: int) -> Tensor:
    """Rows of `length` tokens [N, length], cut from all conversations one after another; user and assistant text
    alike."""
    tokens: list[Tensor] = []
    for batch in load_conversations([path]).iter(batch_size=1000):
        texts = [
            tokenizer.apply_chat_template(json.loads(conversation)["messages"], tokenize=False)
            for conversation in batch["conversation"]
        ]
        ids = chain.from_iterable(tokenizer(texts, add_special_tokens=False).input_ids)
        tokens.append(torch.tensor(list(ids), dtype=torch.int32))
    stream = torch.cat(tokens)
    return stream[: len(stream) // length * length].view(-1, length)


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    return {"input_ids": torch.stack(rows).long()}


class TargetTrainer(Trainer):
    """Language modelling. With tied layers also a loss on the first group's prediction, which pipelined decoding
    (SPEED, arXiv 2310.12072) goes on with. With texts of its own also a loss on their repetitions (unlikelihood
    training, arXiv 1908.04319, section 5.2)."""

    def __init__(
        self,
        *,
        muon_learning_rate: float,
        early_layer: int | None = None,
        early_weight: float = 0.0,
        own_texts: OwnTexts | None = None,
        unlikelihood: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.muon_learning_rate, self.own_texts, self.unlikelihood = muon_learning_rate, own_texts, unlikelihood
        self.early_layer, self.early_weight = early_layer, early_weight

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        trained: Any = self.model
        named = ((name.replace("embed_tokens", "embedding"), weight) for name, weight in trained.named_parameters())
        rates: dict[str, Any] = {
            "muon_learning_rate": self.muon_learning_rate,
            "learning_rate": self.args.learning_rate,
        }
        self.optimizer = MuonWithAdamW(named, **rates, weight_decay=self.args.weight_decay)
        return self.optimizer

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any) -> Any:
        input_ids = inputs["input_ids"]
        early_layers = [self.early_layer] if self.early_layer is not None and model.training else []
        states = request_states(early_layers)
        outputs = model(input_ids=input_ids, use_cache=False, output_hidden_states=states)
        loss = score_text(outputs.logits, input_ids)
        for layer in early_layers:
            trained: Any = self.model
            early = trained.lm_head(trained.model.norm(outputs.hidden_states[layer]))
            loss = loss + self.early_weight * score_text(early, input_ids)
        if self.own_texts is not None and model.training:
            texts, is_repeated = self.own_texts.draw(self.model, input_ids, self.state.global_step)
            own = model(input_ids=texts, use_cache=False).logits
            loss = loss + self.unlikelihood * score_repetitions(own, texts, is_repeated)
        return (loss, outputs) if return_outputs else loss

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Writes tied weights once for each layer, since safetensors refuses to share them."""
        weights = self.model.state_dict().items()
        super()._save(output_dir, {name: value.clone() if ".layers." in name else value for name, value in weights})


def score_text(logits: Tensor, input_ids: Tensor) -> Tensor:
    """The mean loss on the next tokens."""
    return cross_entropy(logits[:, :-1].float().flatten(0, 1), input_ids[:, 1:].flatten())


def score_repetitions(logits: Tensor, texts: Tensor, is_repeated: Tensor) -> Tensor:
    """Minus the mean log of the probability of not choosing the repeated tokens."""
    chosen = logits[:, :-1].float().log_softmax(-1).gather(-1, texts[:, 1:, None]).squeeze(-1).exp()
    unlikely = -torch.log1p(-chosen.clamp(max=1 - 1e-5)) * is_repeated[:, 1:]
    return unlikely.sum() / is_repeated.sum().clamp(min=1)


def find_repeated(texts: Tensor, special_ids: list[int]) -> Tensor:
    """Which tokens of texts [N, L] end a 4-gram that occurred before in their text; [N, L]. 4-grams with special tokens
    do not count."""
    same = texts[:, :, None] == texts[:, None, :]
    num = texts.shape[1] - 3
    equal = torch.stack([same[:, start : start + num, start : start + num] for start in range(4)]).all(0)
    occurred = equal.tril(-1).any(-1)
    special = torch.tensor(special_ids, device=texts.device)
    is_plain = ~torch.isin(texts, special).unfold(1, 4, 1).any(-1)
    return torch.nn.functional.pad(occurred & is_plain, (3, 0))


class OwnTexts:
    """Greedy texts of the model in training, with their repeated tokens. A resumed run writes new texts at once.

    Args:
        prefixes: [N, P] tokens that the texts go on from.
    """

    def __init__(self, prefixes: Tensor, special_ids: list[int], *, num_texts: int, num_steps: int) -> None:
        self.prefixes, self.special_ids, self.num_texts, self.num_steps = prefixes, special_ids, num_texts, num_steps
        self.texts, self.written_at = prefixes[:0], -1

    def draw(self, model: Any, like: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """As many texts as `like` has rows, and which of their tokens are repeated."""
        if self.written_at < 0 or step >= self.written_at + self.num_steps:
            chosen = self.prefixes[torch.randperm(len(self.prefixes))[: self.num_texts]].to(like.device)
            model.eval()
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                options = {"do_sample": False, "max_new_tokens": 128, "eos_token_id": None}
                self.texts = torch.cat(
                    [
                        model.generate(part, attention_mask=torch.ones_like(part), **options)
                        for part in chosen.split(1024)
                    ]
                )
            model.train()
            self.written_at = step
        texts = self.texts[torch.randint(len(self.texts), (len(like),))].clone()
        is_repeated = find_repeated(texts, self.special_ids)
        is_repeated[:, : self.prefixes.shape[1]] = False  # not the model's own
        return texts, is_repeated


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
        if args.compile_layers:
            for layer in model.model.layers:
                layer.compile(dynamic=False)
        rows, own_texts = make_rows(args.dataset, tokenizer, args.row_length), None
        if args.unlikelihood:
            own_texts = OwnTexts(
                rows[:, :64].long(),
                tokenizer.all_special_ids,
                num_texts=args.own_texts,
                num_steps=args.own_texts_steps,
            )
        trainer = TargetTrainer(
            model=model,
            args=training,
            train_dataset=rows,
            data_collator=collate,
            muon_learning_rate=args.muon_learning_rate,
            early_layer=args.tied_group_size,
            early_weight=args.early_weight,
            own_texts=own_texts,
            unlikelihood=args.unlikelihood,
        )
        resume = training.resume_from_checkpoint
        trainer.train(resume_from_checkpoint={"true": True, "false": None}.get(str(resume), resume))
        if args.eval_dataset is not None:
            held_out = make_rows(args.eval_dataset, tokenizer, args.row_length)[: args.eval_tokens // args.row_length]
            console.print(f"perplexity {math.exp(trainer.evaluate(held_out)['eval_loss']):.2f}")
        model.to(torch.bfloat16)
        trainer._save(training.output_dir)
        tokenizer.save_pretrained(training.output_dir)
        console.print(f"repeated 4-grams at T = 0: {repeated_4grams(training.output_dir, args.prompts):.0%}")


if __name__ == "__main__":
    main()
