"""Load on servers: many clients at once, for plain decoding, for heads, and for `transformers serve`, in one run.

    python scripts/benchmarks/serving.py --heads examples/heads/eagle3 examples/heads/mtp --clients 8
    python scripts/benchmarks/serving.py --heads examples/heads/eagle3 --clients 32 --requests 400 --temperature 0.8 \
        --seconds 300 --rounds 1

Every contender is a server of its own on this machine. All get the same requests, in rounds that take turns; with
`--seconds`, over and over until the time has passed. The texts are compared with those that the target gives when it
decodes each request alone, without drafts.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import openai
import torch

from draftsmith.inference import Target, generate
from draftsmith.scripts.measuring.environment import describe_machine, describe_program
from draftsmith.scripts.shared.model_loading import DTYPES, encode_messages, load_target
from draftsmith.scripts.shared.whole_files import write_text
from draftsmith.training.data.options import option
from draftsmith.training.options.command_line import ProgramParser
from draftsmith.training.options.one_line_errors import one_line_errors

SERVE = Path(__file__).resolve().parents[1] / "serve.py"
STOCK = "transformers serve"
STOCK_PROGRAM = "import sys; from transformers.cli.transformers import main; sys.argv[0] = 'transformers'; main()"
START_SECONDS = 300
PERCENTILES = (50, 90, 99)


@dataclass
class ServingArguments:
    target: str = option(default="examples/chat-13m", help="The target: a folder or a hub id.")
    heads: list[str] = option(
        default_factory=list, help="Draft heads; each has a server of its own.", metadata={"nargs": "+"}
    )
    tree: str | None = option(default=None, help="Token tree of all heads; none = the default.")
    stock: bool = option(default=True, help="Also measure transformers serve.")
    dtype: str = option(default="float32", help="Dtype of the weights.", metadata={"choices": list(DTYPES)})
    prompts: str = option(default="examples/prompts.jsonl", help="JSON lines with `turns`.")
    clients: int = option(default=8, help="Clients that ask at the same time.")
    requests: int = option(default=64, help="Requests of one contender in one round.")
    seconds: float = option(
        default=0.0, help="Length of a round: the requests are repeated for so long; 0 = each request once."
    )
    rounds: int = option(default=2, help="Rounds; the contenders take turns in each.")
    max_batch_size: int = option(default=8, help="Rows of our servers.")
    max_new_tokens: int = option(default=96, help="Longest reply; each request has a limit of its own.")
    min_new_tokens: int = option(default=16, help="The smallest of these limits.")
    temperature: float = option(default=0.0, help="0 = greedy; else each request has a seed of its own.")
    seed: int = option(default=0, help="Seed of the requests.")
    output: str = option(default="outputs/serving.json", help="JSON file to write.")

    def __post_init__(self) -> None:
        if not 1 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"got --min_new_tokens {self.min_new_tokens} and --max_new_tokens {self.max_new_tokens}: give 1 or "
                "more, and no more than --max_new_tokens"
            )
        for name in ("clients", "requests", "rounds", "max_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"got --{name} {getattr(self, name)}: give at least 1")
        if not 0 <= self.seconds < float("inf"):
            raise ValueError(f"got --seconds {self.seconds}: give 0 (each request once) or more")


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: str
    max_tokens: int
    seed: int

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt}]


@dataclass(frozen=True)
class Answer:
    """The reply to the request of this number, with seconds from sending it to the first text and to the end."""

    number: int
    text: str
    first_seconds: float
    seconds: float


def draw_asks(args: ServingArguments) -> list[Ask]:
    draws = random.Random(args.seed)
    lines = Path(args.prompts).read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["turns"][0] for line in lines if line.strip()]
    return [
        Ask(draws.choice(prompts), draws.randint(args.min_new_tokens, args.max_new_tokens), draws.randrange(2**31))
        for _ in range(args.requests)
    ]


@contextmanager
def running(words: Sequence[str], address: str | None = None) -> Iterator[str]:
    """Runs a server; yields its address, which it prints unless it is given."""
    with subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            end, seen = time.monotonic() + START_SECONDS, ""
            while time.monotonic() < end:
                seen += (line := process.stdout.readline())
                if not line:
                    break
                found = re.search(r"(?:serving at|running on) (http://[^/\s]+)", line)
                if found is not None:
                    # A server that fills the pipe would wait for ever.
                    threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()
                    yield address or found[1]
                    return
            raise ValueError(f"{' '.join(words[:2])} did not start: {seen.strip()[-500:]}")
        finally:
            process.terminate()
            process.wait(START_SECONDS)


def server_words(args: ServingArguments, heads: str | None) -> list[str]:
    """The command of one of our servers."""
    words = [str(SERVE), "--target", args.target, "--dtype", args.dtype, "--port", "0"]
    words += ["--max_batch_size", str(args.max_batch_size), "--max_length", "1024"]
    words += ["--max_queue", str(max(args.clients, args.requests))]
    words += [] if heads is None else ["--heads", heads, *(["--tree", args.tree] if args.tree is not None else [])]
    return words


def in_turn(asks: Sequence[Ask], seconds: float) -> Iterator[tuple[int, Ask]]:
    """The requests with their numbers: once, or over and over until the seconds have passed."""
    if not seconds:
        yield from enumerate(asks)
        return
    end = time.monotonic() + seconds
    for number, ask in cycle(enumerate(asks)):
        if time.monotonic() > end:
            return
        yield number, ask


async def ask_all(
    args: ServingArguments, name: str, address: str, asks: Sequence[Ask], *, seconds: float = 0
) -> tuple[list[Answer], float]:
    """The requests, at most `clients` at once; the answers, and the seconds of all together."""
    model = args.target if name == STOCK else Path(args.target).name
    answers: list[Answer] = []
    waiting = in_turn(asks, seconds)

    async def work(client: openai.AsyncOpenAI) -> None:
        for number, ask in waiting:
            options: dict[str, Any] = {"temperature": args.temperature, "seed": ask.seed}
            if name != STOCK:
                options["extra_body"] = {"top_k": 0}  # as in `decode_alone`, whatever the generation config says
            begin, first, text = time.perf_counter(), None, ""
            stream = await client.chat.completions.create(
                model=model, messages=ask.messages, max_tokens=ask.max_tokens, stream=True, **options
            )
            async for chunk in stream:
                piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
                first = first or (time.perf_counter() if piece else None)
                text += piece
            end = time.perf_counter()
            answers.append(Answer(number, text, (first or end) - begin, end - begin))

    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=600) as client:
        begin = time.perf_counter()
        await asyncio.gather(*(work(client) for _ in range(args.clients)))
        return answers, time.perf_counter() - begin


def decode_alone(args: ServingArguments, asks: Sequence[Ask]) -> tuple[Target, Any, list[str]]:
    """The target, its tokenizer, and the text of each request by itself, without drafts."""
    target, tokenizer = load_target(args.target, dtype=args.dtype)
    texts = []
    for ask in asks:
        input_ids = encode_messages(tokenizer, ask.messages).to(target.device)
        options: dict[str, Any] = {"max_new_tokens": ask.max_tokens, "do_sample": args.temperature > 0}
        if args.temperature > 0:
            # A server gives the first of n replies the seed that the first row of a batch has.
            options |= {"temperature": args.temperature, "top_k": 0, "seed": ask.seed}
        sequence = generate(target, None, input_ids, torch.ones_like(input_ids), **options).sequences[0]
        texts.append(tokenizer.decode(sequence[input_ids.shape[1] :], skip_special_tokens=True))
    return target, tokenizer, texts


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The nearest ranks.

    >>> percentiles([3.0, 1.0, 2.0])
    {'p50': 2.0, 'p90': 3.0, 'p99': 3.0}
    """
    ordered = sorted(values)
    return {f"p{rank}": ordered[min(len(ordered) - 1, len(ordered) * rank // 100)] for rank in PERCENTILES}


def make_row(
    name: str, rounds: Sequence[tuple[list[Answer], float]], texts: Sequence[str], tokenizer: Any
) -> dict[str, Any]:
    """One contender's numbers, over all rounds."""
    answers = [answer for each, _ in rounds for answer in each]
    tokens = [sum(len(tokenizer(answer.text)["input_ids"]) for answer in each) for each, _ in rounds]
    return {
        "name": name,
        "requests": len(answers),
        "seconds": sum(seconds for _, seconds in rounds),
        "tokens_per_second": sum(tokens) / sum(seconds for _, seconds in rounds),
        "tokens_per_second_by_round": [count / seconds for count, (_, seconds) in zip(tokens, rounds, strict=True)],
        "first_text_seconds": percentiles([answer.first_seconds for answer in answers]),
        "latency_seconds": percentiles([answer.seconds for answer in answers]),
        "texts_that_differ": sum(answer.text != texts[answer.number] for answer in answers),
    }


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    print(
        f"{'':<20}{'tokens/s':>9}{'first text p50':>16}{'p99':>7}{'latency p50':>13}{'p90':>7}{'p99':>7}{'differ':>8}"
    )
    for row in rows:
        first, latency = row["first_text_seconds"], row["latency_seconds"]
        print(
            f"{row['name']:<20}{row['tokens_per_second']:>9.0f}{first['p50']:>16.2f}{first['p99']:>7.2f}"
            f"{latency['p50']:>13.2f}{latency['p90']:>7.2f}{latency['p99']:>7.2f}"
            f"{row['texts_that_differ']:>4}/{row['requests']:<4}"
        )


def run(args: ServingArguments) -> list[dict[str, Any]]:
    asks = draw_asks(args)
    target, tokenizer, texts = decode_alone(args, asks)
    contenders: dict[str, list[str]] = {"plain": server_words(args, None)}
    contenders |= {Path(heads).name: server_words(args, heads) for heads in args.heads}
    if args.stock:
        port = random.randrange(20000, 40000)
        words = ["-c", STOCK_PROGRAM, "serve", args.target, "--port", str(port), "--dtype", args.dtype]
        contenders[STOCK] = [*words, "--device", str(target.device)]
    rounds: dict[str, list[tuple[list[Answer], float]]] = {name: [] for name in contenders}
    with ExitStack() as stack:
        addresses = {name: stack.enter_context(running(words)) for name, words in contenders.items()}
        for name, address in addresses.items():  # first calls are slower
            asyncio.run(ask_all(args, name, address, asks[: args.clients]))
        for number in range(args.rounds):
            for name in sorted(contenders, reverse=number % 2 == 1):
                rounds[name].append(asyncio.run(ask_all(args, name, addresses[name], asks, seconds=args.seconds)))
                print(f"round {number + 1}: {name} gave {len(rounds[name][-1][0])} replies", flush=True)
    rows = [make_row(name, each, texts, tokenizer) for name, each in rounds.items()]
    report = {**describe_machine(target.device), **describe_program(), "arguments": asdict(args), "rows": rows}
    write_text(Path(args.output), json.dumps(report, indent=1) + "\n")
    print_rows(rows)
    print(f"wrote {args.output}")
    return rows


def main() -> None:
    with one_line_errors("serving.py"):
        (args,) = ProgramParser([ServingArguments], doc=__doc__).read()
        run(args)


if __name__ == "__main__":
    main()
