"""Lets a target write training conversations (JSON lines) for draftsmith train.

    # the target answers the user turns of your conversations
    draftsmith data --target examples/chat-13m --prompts chat.jsonl.gz --output replies.jsonl
    # the target writes both sides
    draftsmith data --target examples/chat-13m --mode self --num_conversations 5000 --output self.jsonl
    # all GPUs of a machine
    accelerate launch -m draftsmith data --target examples/chat-13m --prompts chat.jsonl.gz --output replies.jsonl

Finished conversations reach the disk within seconds. Run the same command again to continue after a kill. docs/data.md
explains which turns are dropped, and how several processes and machines share the work.
"""

import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from tqdm.auto import tqdm

from draftsmith.inference import Decoder
from draftsmith.inference.request.model_settings import describe_model_settings
from draftsmith.inference.targets.files import read_generation_config, read_tokenizer
from draftsmith.scripts.shared.model_loading import check_device, check_folder, load_heads, load_target, resolve_dtype
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.options.program_parser import ProgramParser
from draftsmith.training.synthesis.arguments import SynthesisArguments
from draftsmith.training.synthesis.endpoint_replies import EndpointReplies
from draftsmith.training.synthesis.output import SynthesisOutput
from draftsmith.training.synthesis.prompts import Conversation, choose_prompts, plan_self_synthesis, read_prompts
from draftsmith.training.synthesis.reply_sources import DecodedReplies, ReplySource
from draftsmith.training.synthesis.synthesizer import synthesize
from draftsmith.training.synthesis.turn_template import TurnTemplate

SECONDS_BETWEEN_WRITES = 5.0

GROUPS = {
    "conversations": "target mode prompts output num_conversations max_turns",
    "sampling": "max_new_tokens temperature top_p top_k seed",
    "decoding": "heads tree batch_size dtype device",
    "a server writes the replies": "endpoint endpoint_model concurrency",
    "several machines": "num_shards shard_index",
}


def main() -> None:
    with one_line_errors("draftsmith data", kept="finished conversations are kept"):
        (args,) = ProgramParser([SynthesisArguments], doc=__doc__, groups=GROUPS).read()
        generate_data(args)


def generate_data(args: SynthesisArguments) -> None:
    plan = make_plan(args)  # first: it finds wrong input before the target is loaded
    names = [conversation.id for conversation in plan]
    index, count = args.shard()
    if args.endpoint is None and count == 1:  # shards may run on other machines, and must agree
        args = replace(args, dtype=resolve_dtype(args.target, args.dtype, check_device(args.device)))
    check_folder(args.target)
    generation_config = read_generation_config(args.target) if args.endpoint is None else None
    settings = args.settings_of_the_data(generation_config)
    output = SynthesisOutput(Path(args.output), settings, shard=(index, count))
    todo = [conversation for conversation in plan[index::count] if conversation.id not in output.done]
    try:
        if todo:
            source = make_source(args)
            start = time.perf_counter()
            parts = synthesize(source, todo, seed=args.seed, keep_truncated=args.keep_truncated)
            store(parts, output, len(todo))
            source.close()
            speed = f"{source.stats.num_new_tokens / (time.perf_counter() - start):.4g} tokens a second"
            print(speed + f", acceptance length {source.stats.acceptance_length:.2f}" * bool(args.heads))
    finally:
        output.close()
    stats = output.merge(names)
    if stats is None:
        print(
            f"{args.output}: shard {index} of {count} is done; the last shard to finish, or a rerun, merges all shards"
        )
    else:
        report(stats, f"{args.output}: {stats['conversations']} conversations, {len(todo)} of them new")
        print(f"next: draftsmith train --target {args.target} --dataset {args.output}")


def make_plan(args: SynthesisArguments) -> list[Conversation]:
    if args.mode == "self":
        return plan_self_synthesis(args.num_conversations, seed=args.seed, num_turns=args.max_turns or 1)
    prompts = read_prompts(
        args.prompts, split=args.prompts_split, max_turns=args.max_turns, record_format=args.record_format()
    )
    return choose_prompts(prompts, args.num_conversations, seed=args.seed)


def make_source(args: SynthesisArguments) -> ReplySource:
    """The writer of the turns: a server, or the target on this process's device."""
    settings = args.turn_settings()
    if args.endpoint is not None:
        template = TurnTemplate(read_tokenizer(args.target))
        stop_ids = template.find_stop_ids(template.tokenizer.eos_token_id, needs_user=args.mode == "self")
        model = args.endpoint_model or args.target
        return EndpointReplies(args.endpoint, model, template, stop_ids, settings, concurrency=args.concurrency)
    target, tokenizer = load_target(args.target, dtype=args.dtype, device=args.device, keeps_dtype=True)
    template = TurnTemplate(tokenizer)
    stop_ids = template.find_stop_ids(target.model.generation_config.eos_token_id, needs_user=args.mode == "self")
    if args.heads is None:
        decoder = Decoder(target)
    else:
        decoder = Decoder(target, load_heads(args.heads, target), tree=args.tree or "chain:3")
    return DecodedReplies(decoder, template, stop_ids, settings, batch_size=args.batch_size)


def store(parts: Iterable[list[Conversation]], output: SynthesisOutput, count: int) -> None:
    """Stores the conversations. Finished ones reach the disk within seconds, also if another one fails."""
    finished: list[Conversation] = []
    last_write = time.monotonic()
    with tqdm(total=count, unit=" conversations", mininterval=1.0) as progress:
        try:
            for part in parts:
                finished += part
                progress.update(len(part))
                if time.monotonic() - last_write > SECONDS_BETWEEN_WRITES:
                    batch, finished = finished, []
                    output.append(batch)
                    last_write = time.monotonic()
        finally:
            output.append(finished)


def report(stats: dict[str, Any], title: str) -> None:
    print(title)
    print(f"  {stats['turns']} turns, {stats['tokens']} tokens")
    if own := stats["settings"]["generation_config"]:
        print(f"  {describe_model_settings(own)}")
    for name in ("dropped", "shortened"):
        for reason, entry in stats[name].items():
            print(f"  {name:9} {entry['count']:8} ({entry['share']:6.1%})  {reason}")
    if any("truncated" in reason for reason in (*stats["dropped"], *stats["shortened"])):
        keeps, most = stats["settings"]["keep_truncated"], stats["settings"]["max_new_tokens"]
        remedy = "" if keeps else " --keep_truncated keeps them, and training does not learn their ends."
        print(f"  Truncated replies have more than {most} tokens.{remedy} A larger --max_new_tokens completes them.")


if __name__ == "__main__":
    main()
