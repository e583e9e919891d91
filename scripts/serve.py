"""Serves a target and its drafters on one machine, for OpenAI's clients and for browsers.

    draftsmith serve --target examples/chat-13m --heads examples/heads/eagle3
    draftsmith serve --target examples/chat-13m --heads examples/heads/eagle3 examples/heads/mtp --port 8001

The first heads draft unless a request names others; "none" decodes plainly. Ctrl-C or SIGTERM ends the server: it takes
no more requests, and running replies have some seconds to end.
"""

import math
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from draftsmith.inference.drafters.base import Drafter
from draftsmith.inference.request.model_settings import describe_model_settings, find_model_settings
from draftsmith.inference.serving.app import create_app
from draftsmith.inference.serving.scheduler import Limits, Scheduler
from draftsmith.inference.serving.server import DrainingServer, address_of, bind
from draftsmith.scripts.shared.draft_vocabulary import DATA_HELP, SIZE_HELP, DraftVocabulary
from draftsmith.scripts.shared.model_loading import (
    DTYPE_HELP,
    DTYPES,
    PACK_HELP,
    TREE_HELP,
    load_drafter,
    load_target,
    packs_weights,
)
from draftsmith.training.data.options import option, refuse_without, require_positive
from draftsmith.training.learning.learner import OnlineLearner
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.options.program_parser import ProgramParser

API_KEY_VARIABLE = "DRAFTSMITH_API_KEY"
GROUPS = {
    "target and drafters": "target heads draft_vocab_size drafter_model ngrams dtype device tree pack_weights "
    "batch_invariant",
    "server": "host port api_key model_name per_request_spec_decode_metrics drain_seconds",
    "learning": "learn learn_share learn_memory learn_dir learn_seconds",
    "limits": "max_batch_size max_length max_queue max_lanes threads",
}


@dataclass
class ServeArguments:
    target: str = option(help="The target: a folder, a hub id or a GGUF file.")
    heads: list[str] = option(
        default_factory=list, help="Draft heads, the default first: folders or hub ids.", metadata={"nargs": "+"}
    )
    draft_vocab_size: int | None = option(default=None, help=SIZE_HELP)
    draft_vocab_data: list[str] = option(default_factory=list, help=DATA_HELP)
    drafter_model: str | None = option(
        default=None, help="A small causal LM with the target's tokenizer, as one more drafter."
    )
    staged: bool = option(default=False, help="N-grams draft for the --drafter_model, in chains.")
    ngrams: bool = option(default=False, help="N-grams of the text, as one more drafter.")
    tree: str | None = option(
        default=None,
        help=f"Token tree; none = auto, which drafts less the more replies run: {TREE_HELP}.",
    )
    dtype: str = option(default="auto", help=DTYPE_HELP, metadata={"choices": list(DTYPES)})
    device: str | None = option(default=None, help="Device; none = cuda if there is one, else cpu.")
    pack_weights: bool | None = option(default=None, help=PACK_HELP, metadata={"nargs": "?", "const": True})
    batch_invariant: bool | None = option(
        default=None,
        help="Score tokens alike in passes of any width: other rows then change no bit; none = in bfloat16 and float16 "
        "on a CPU.",
        metadata={"nargs": "?", "const": True},
    )
    host: str = option(default="127.0.0.1", help="Address; 0.0.0.0 = all networks (give an --api_key).")
    port: int = option(default=8000, help="Port; 0 = any free one.")
    api_key: str | None = option(
        default=None, help=f"Key that requests must carry; none = ${API_KEY_VARIABLE}, and without it no key."
    )
    model_name: str | None = option(default=None, help="The target's name for clients; none = the name of its folder.")
    per_request_spec_decode_metrics: str = option(
        default="summary",
        help="Figures of drafting in each reply's metrics.speculative_decoding, as in vLLM.",
        metadata={"choices": ["none", "summary", "detailed"]},
    )
    drain_seconds: float = option(default=10.0, help="Seconds that running replies have when the server stops.")
    max_batch_size: int = option(default=8, help="Most replies of one drafter that are decoded at once.")
    max_length: int = option(
        default=2048, help="Most tokens of a conversation, the reply included; cut to what the target reads."
    )
    max_queue: int = option(default=64, help="Most replies that wait; more are refused (429).")
    max_lanes: int = option(default=2, help="Most pairs of drafter and tree at once; each has a cache of its own.")
    learn: bool = option(default=False, help="Let the first heads learn from the replies. Texts stay the same.")
    learn_share: float = option(default=0.1, help="Share of the time that learning may take while replies run.")
    learn_memory: int = option(default=512, help="MB of memory for the states of replies to learn from.")
    learn_dir: str | None = option(
        default=None, help="Folder that keeps the learned weights, never texts, for the next start; none = not kept."
    )
    learn_seconds: float = option(default=60.0, help="Seconds between two comparisons of learned weights.")
    threads: int | None = option(
        default=None, help="CPU threads of the engine; none = one fewer than torch's default, for the connections."
    )

    def __post_init__(self) -> None:
        counts = ("max_batch_size", "max_length", "max_queue", "max_lanes", "threads")
        require_positive(self, (*counts, "learn_memory", "learn_seconds"))
        self.vocabulary = DraftVocabulary.of(self)
        if self.learn and not self.heads:
            raise ValueError("got --learn without --heads: give the heads that are to learn")
        if not 0 < self.learn_share <= 1:
            raise ValueError(f"got --learn_share {self.learn_share}: give more than 0 and at most 1")
        refuse_without(self, "learn", [key.name for key in fields(self) if key.name.startswith("learn_")])
        if self.api_key is None:
            self.api_key = os.environ.get(API_KEY_VARIABLE)
        if self.api_key == "":
            raise ValueError(f"got an empty --api_key or ${API_KEY_VARIABLE}: give a key, or leave it out for none")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"got --port {self.port}: give 0 to 65535")
        if not 0 <= self.drain_seconds < math.inf:
            raise ValueError(f"got --drain_seconds {self.drain_seconds}: give 0 or more")
        if self.tree is not None and not (self.heads or self.drafter_model or self.ngrams):
            raise ValueError(f"got --tree {self.tree} without a drafter: nothing is drafted in plain decoding")


def build_scheduler(args: ServeArguments) -> tuple[Scheduler, object]:
    """The scheduler, not started, and the tokenizer."""
    _note(f"loading {args.target}")
    target, tokenizer = load_target(args.target, dtype=args.dtype, device=args.device)
    drafters: dict[str, Drafter] = {}
    sources: list[dict[str, Any]] = [{"heads": heads, "vocabulary": args.vocabulary} for heads in args.heads]
    if args.drafter_model is not None:
        sources.append({"drafter_model": args.drafter_model, "staged": args.staged})
    if args.ngrams:
        sources.append({"ngrams": True})
    for source in sources:
        kind, place = next(iter(source.items()))
        name = kind if place is True else _name_of(place)
        if name in drafters:
            raise ValueError(f"got two drafters called {name}: rename the folder of one of them")
        _note(f"loading {kind if place is True else place}")
        drafters[name] = load_drafter(target, tokenizer, **source)
    learner: OnlineLearner | None = None
    if args.learn:
        learner = OnlineLearner(
            target,
            next(iter(drafters.values())),  # the first heads
            share=args.learn_share,
            num_bytes=args.learn_memory << 20,
            folder=args.learn_dir,
            trial_seconds=args.learn_seconds,
        )
        learner.start()
    if packs_weights(target, args.pack_weights):
        _note("packing the weights")
        target = target.with_packed_weights()
    if args.batch_invariant is None:
        target = target.prefer_batch_invariant()
    elif args.batch_invariant:
        target = target.batch_invariant()
    length = min(args.max_length, target.max_length or args.max_length)
    limits = Limits(args.max_batch_size, length, args.max_queue, args.max_lanes)
    _note("allocating the caches")
    try:
        return Scheduler(target, drafters, tree=args.tree, limits=limits, learner=learner), tokenizer
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):  # "allocate memory", "out of memory"
            raise
        raise ValueError(
            f"the caches cannot be allocated ({str(error).splitlines()[0]}): lower --max_batch_size "
            f"({args.max_batch_size}), --max_length ({length}) or --max_lanes ({args.max_lanes})"
        ) from error


def _name_of(place: str) -> str:
    """What clients call a folder or a hub id."""
    return Path(place).resolve().name if Path(place).is_dir() else Path(place).name


def _note(what: str) -> None:
    """The standard output is for what the server says when it is ready."""
    print(f"{what} ...", file=sys.stderr, flush=True)


def run(args: ServeArguments) -> None:
    port = bind(args.host, args.port)  # first: loading takes long
    # Threads that wait for one another stand still while the connections have one of their cores.
    torch.set_num_threads(args.threads or max(1, torch.get_num_threads() - 1))
    scheduler, tokenizer = build_scheduler(args)
    model = args.model_name or _name_of(args.target)
    app = create_app(
        scheduler,
        tokenizer,
        model=model,
        api_key=args.api_key,
        metrics=args.per_request_spec_decode_metrics,
    )
    server = DrainingServer(app, drain_seconds=args.drain_seconds)
    size = scheduler.num_bytes / 1e6
    print(
        f"{model} with {', '.join(scheduler.drafters)}: at most {args.max_batch_size} replies of "
        f"{scheduler.limits.max_length} tokens at once for each of {args.max_lanes} drafters or trees, {size:.0f} MB "
        "of keys and values",
        flush=True,
    )
    if own := find_model_settings(scheduler.target.model.generation_config, {"do_sample": True}):
        print(f"what requests leave out comes {describe_model_settings(own)}", flush=True)
    print(f"serving at {address_of(port)}/v1 (Ctrl-C ends)", flush=True)  # connections wait until the server runs
    with suppress(KeyboardInterrupt):  # uvicorn raises the signal again when all is over
        server.run(sockets=[port])
    if isinstance(scheduler.learner, OnlineLearner):
        scheduler.learner.stop()


def main() -> None:
    with one_line_errors("draftsmith serve"):
        (args,) = ProgramParser([ServeArguments], doc=__doc__, groups=GROUPS).read()
        run(args)


if __name__ == "__main__":
    main()
