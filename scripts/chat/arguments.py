"""The options of `draftsmith chat`."""

import math
from dataclasses import dataclass
from typing import Any

from draftsmith.inference.acceptance.rules import RULES
from draftsmith.scripts.shared.draft_vocabulary import DATA_HELP, SIZE_HELP, DraftVocabulary
from draftsmith.scripts.shared.model_loading import DTYPE_HELP, DTYPES, PACK_HELP, TREE_HELP
from draftsmith.training.data.options import find_given, option, require_positive


@dataclass
class GenerateArguments:
    target: str = option(help="The target: a folder, a hub id or a GGUF file.")
    heads: str | None = option(default=None, help="Draft heads: a folder or a hub id; none = plain decoding.")
    draft_vocab_size: int | None = option(default=None, help=SIZE_HELP)
    draft_vocab_data: list[str] = option(default_factory=list, help=DATA_HELP)
    drafter_model: str | None = option(
        default=None, help="A small causal LM with the target's tokenizer, as the drafter: a folder or a hub id."
    )
    staged: bool = option(default=False, help="N-grams draft for the --drafter_model, in chains.")
    ngrams: bool = option(default=False, help="Draft with n-grams of the text.")
    prompt: str | None = option(
        default=None, help="The prompt; none = chat in a terminal, or read lines of the standard input."
    )
    system: str | None = option(default=None, help="System message of every conversation.")
    max_new_tokens: int = option(default=256, help="Longest reply in tokens.")
    temperature: float = option(default=0.0, help="Sampling temperature; 0 = greedy.")
    top_k: int = option(default=0, help="Sample only from the k likeliest tokens; 0 = from all.")
    top_p: float = option(default=1.0, help="Sample only from the likeliest tokens with this total probability.")
    seed: int | None = option(default=None, help="Seed of the sampling; none = a new text each time.")
    tree: str | None = option(default=None, help=f"Token tree: {TREE_HELP}.")
    acceptance: str = option(
        default="exact",
        help="Acceptance rule: exact, rejection, typical; for sampled text. exact gives the text of plain decoding. "
        "rejection (chains, static trees) keeps the distribution. typical is lossy.",
        metadata={"choices": list(RULES)},
    )
    dtype: str = option(default="auto", help=DTYPE_HELP, metadata={"choices": list(DTYPES)})
    device: str | None = option(default=None, help="Device; none = cuda if there is one, else cpu.")
    compile: bool = option(default=False, help="Compile the decoding: a slow start, then faster steps.")
    pack_weights: bool | None = option(default=None, help=PACK_HELP, metadata={"nargs": "?", "const": True})
    batch_invariant: bool | None = option(
        default=None,
        help="Score tokens alike in passes of any width, so that drafts change no bit of a text; none = in bfloat16 "
        "and float16 on a CPU, without --compile.",
        metadata={"nargs": "?", "const": True},
    )
    compare: bool = option(
        default=False, help="Decode each reply a second time without drafts, and compare texts and speeds."
    )
    distributed: bool = option(
        default=False, help="Under torchrun: this process drafts, in chains, while all other ranks verify."
    )
    raw: bool = option(default=False, help="Continue the prompt without the chat template.")

    def __post_init__(self) -> None:
        self.vocabulary = DraftVocabulary.of(self)
        models = {"--heads": self.heads, "--drafter_model": self.drafter_model}
        drafters = [name for name, given in models.items() if given is not None] + ["--ngrams"] * self.ngrams
        if len(drafters) > 1:
            raise ValueError(f"got {' and '.join(drafters)}: give one of them")
        if self.staged and self.drafter_model is None:
            raise ValueError("got --staged without --drafter_model: give the small model that n-grams should draft for")
        if self.staged and (self.tree or "gamma").partition(":")[0] not in ("chain", "gamma"):
            raise ValueError(
                f"got --staged with --tree {self.tree}: --staged drafts chains, so give chain, chain:LENGTH or gamma"
            )
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError(f"got --prompt {self.prompt!r}: give a text, or leave it out for a chat")
        require_positive(self, ("max_new_tokens",))
        if not 0 <= self.temperature < math.inf:
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
        if not drafters and (given := find_given(self, ("tree", "acceptance", "compare", "distributed"))):
            raise ValueError(f"got --{given[0]} without --heads, --drafter_model or --ngrams: nothing is drafted")
        own = ("tree", "acceptance", "compile", "pack_weights", "batch_invariant")
        given = [name for name in find_given(self, own) if getattr(self, name) or name == "batch_invariant"]
        if self.distributed and given:
            raise ValueError(f"got --distributed with --{given[0]}: servers verify chains, exactly and eagerly")
        if self.raw and self.system is not None:
            raise ValueError("--system needs the chat template, and --raw leaves the template out: drop one of the two")

    def generate_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of `Decoder.generate`."""
        kwargs: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": self.temperature > 0}
        if kwargs["do_sample"]:
            kwargs |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "seed": self.seed}
        return kwargs
