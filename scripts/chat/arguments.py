"""The options of `scripts/generate.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from draftsmith.inference.acceptance.rules import RULES
from draftsmith.scripts.shared.draft_vocabulary import DATA_HELP, SIZE_HELP, DraftVocabulary
from draftsmith.scripts.shared.model_loading import DTYPE_HELP, DTYPES, TREE_HELP

DRAFTERS = "--heads, --drafter_model or --ngrams"


@dataclass
class GenerateArguments:
    target: str = field(metadata={"help": "The target: a folder, a hub id or a GGUF file."})
    heads: str | None = field(
        default=None, metadata={"help": "Draft heads: a folder or a hub id; none = plain decoding."}
    )
    draft_vocab_size: int | None = field(default=None, metadata={"help": SIZE_HELP})
    draft_vocab_data: list[str] = field(default_factory=list, metadata={"help": DATA_HELP})
    drafter_model: str | None = field(
        default=None,
        metadata={"help": "A small causal LM with the target's tokenizer, as the drafter: a folder or a hub id."},
    )
    staged: bool = field(
        default=False, metadata={"help": "N-grams draft for the --drafter_model; only with --tree chain or gamma."}
    )
    ngrams: bool = field(default=False, metadata={"help": "Also draft with n-grams of the text."})
    prompt: str | None = field(
        default=None, metadata={"help": "The prompt; none = chat in a terminal, or read lines of the standard input."}
    )
    system: str | None = field(default=None, metadata={"help": "System message of every conversation."})
    max_new_tokens: int = field(default=256, metadata={"help": "Longest reply in tokens."})
    temperature: float = field(default=0.0, metadata={"help": "Sampling temperature; 0 = greedy."})
    top_k: int = field(default=0, metadata={"help": "Sample only from the k likeliest tokens; 0 = from all."})
    top_p: float = field(
        default=1.0, metadata={"help": "Sample only from the likeliest tokens with this total probability."}
    )
    seed: int | None = field(default=None, metadata={"help": "Seed of the sampling; none = a new text each time."})
    tree: str | None = field(default=None, metadata={"help": f"Token tree: {TREE_HELP}."})
    acceptance: str = field(
        default="exact",
        metadata={
            "help": "Acceptance rule: exact, rejection, block_verification, typical; for sampled text. exact gives the "
            "text of plain decoding. rejection (chains, static trees) and block_verification (chains) keep the "
            "distribution. typical is lossy.",
            "choices": list(RULES),
        },
    )
    dtype: str = field(
        default="auto",
        metadata={"help": DTYPE_HELP, "choices": list(DTYPES)},
    )
    device: str | None = field(default=None, metadata={"help": "Device; none = cuda if there is one, else cpu."})
    compile: bool = field(default=False, metadata={"help": "Compile the decoding: a slow start, then faster steps."})
    pack_weights: bool = field(
        default=False,
        metadata={"help": "On a CPU: pack the weights for faster steps. It takes their memory once more."},
    )
    batch_invariant: bool = field(
        default=False,
        metadata={
            "help": "Score tokens alike in passes of any width, so that drafts change no bit of a text. It is slower."
        },
    )
    compare: bool = field(
        default=False,
        metadata={"help": "Decode each reply a second time without drafts, and compare texts and speeds."},
    )
    distributed: bool = field(
        default=False,
        metadata={"help": "Under torchrun: this process drafts, in chains, while all other ranks verify."},
    )
    raw: bool = field(default=False, metadata={"help": "Continue the prompt without the chat template."})
    color: bool = field(default=True, metadata={"help": "Show accepted drafts in colour, by depth (in a terminal)."})

    def __post_init__(self) -> None:
        self.vocabulary = DraftVocabulary.of(self)
        has_drafter = bool(self.heads or self.drafter_model or self.ngrams)
        if self.staged and self.drafter_model is None:
            raise ValueError("got --staged without --drafter_model: give the small model that n-grams should draft for")
        if self.staged and (self.tree or "").partition(":")[0] not in ("chain", "gamma"):
            raise ValueError(
                f"got --staged with --tree {self.tree}: --staged drafts chains, so give chain, chain:LENGTH or gamma"
            )
        if self.max_new_tokens < 1:
            raise ValueError(f"got --max_new_tokens {self.max_new_tokens}: give at least 1")
        if self.temperature < 0:
            raise ValueError(f"got --temperature {self.temperature}: give 0 for greedy decoding, or a positive number")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"got --top_k {self.top_k} and --top_p {self.top_p}: top_k is 0 or more, top_p is in (0, 1]"
            )
        if self.temperature == 0 and (self.top_k, self.top_p) != (0, 1.0):
            raise ValueError("--top_k and --top_p change only sampled text: give a --temperature above 0 too")
        if self.temperature == 0 and self.acceptance != "exact":
            raise ValueError(
                f"got --acceptance {self.acceptance} for greedy decoding, where all rules are the same: give a "
                "--temperature above 0 too"
            )
        own = {"tree": None, "acceptance": "exact", "compile": False, "pack_weights": False, "batch_invariant": False}
        if self.distributed and (given := [name for name, value in own.items() if getattr(self, name) != value]):
            raise ValueError(f"got --distributed with --{given[0]}: servers verify chains, exactly and eagerly")
        if self.distributed and not has_drafter:
            raise ValueError(f"got --distributed without {DRAFTERS}: there is nothing to verify")
        if self.raw and self.system is not None:
            raise ValueError("--system needs the chat template, and --raw leaves the template out: drop one of the two")
        if not has_drafter and self.tree is not None:
            raise ValueError(f"got --tree {self.tree} without {DRAFTERS}: nothing is drafted in plain decoding")
        if not has_drafter and self.compare:
            raise ValueError(f"got --compare without {DRAFTERS}: there is nothing to compare plain decoding with")
        if not has_drafter and self.acceptance != "exact":
            raise ValueError(
                f"got --acceptance {self.acceptance} without {DRAFTERS}: nothing is drafted in plain decoding"
            )

    def generate_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of `Decoder.generate`."""
        kwargs: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": self.temperature > 0}
        if kwargs["do_sample"]:
            kwargs |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "seed": self.seed}
        return kwargs
