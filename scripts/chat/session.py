"""ChatSession: a conversation with a target, and the drafter and tree that decode it."""

import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from draftsmith.inference import Decoder, DistributedDecoder, Drafter, GenerationStats, Target
from draftsmith.inference.distributed.gloo_link import GlooLink
from draftsmith.inference.request.model_settings import describe_model_settings, find_model_settings
from draftsmith.scripts.chat.arguments import GenerateArguments
from draftsmith.scripts.chat.comparison import Reply, compare_with_plain
from draftsmith.scripts.chat.printer import ReplyPrinter, describe, speed_of, without_escapes
from draftsmith.scripts.shared.model_loading import (
    encode_messages,
    find_merged_adapter,
    load_drafter,
    load_target,
    packs_weights,
)


class Conversation:
    """The messages of a chat; makes the next prompt from them."""

    def __init__(self, tokenizer: Any, *, system: str | None, is_raw: bool) -> None:
        if not is_raw and not tokenizer.chat_template:
            raise ValueError("the target's tokenizer has no chat template: use --raw, or set tokenizer.chat_template")
        self.tokenizer = tokenizer
        self.system = system
        self.is_raw = is_raw
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system is not None else []

    def ask(self, turn: str) -> Tensor:
        """Adds a user turn, and returns the prompt: [1, L] token ids."""
        if self.is_raw:
            input_ids: Tensor = self.tokenizer(turn, return_tensors="pt")["input_ids"]
            return input_ids
        self.messages.append({"role": "user", "content": turn})
        return encode_messages(self.tokenizer, self.messages)

    def answer(self, reply: str) -> None:
        self.messages.append({"role": "assistant", "content": reply})


class ChatSession:
    """A target, a drafter, a tree, the sampling options and a conversation, of which commands change all but the first.

    Args:
        console: for replies. Everything else goes to the standard error output.
        is_chat: the conversation goes on from turn to turn, and Ctrl-C ends a reply only.
    """

    def __init__(self, args: GenerateArguments, console: Console, *, is_chat: bool) -> None:
        self.args, self.console, self.is_chat = args, console, is_chat
        self.notes = Console(stderr=True, no_color=console.no_color, highlight=False)
        self.target, self.tokenizer = load_target(args.target, dtype=args.dtype, device=args.device)
        self._is_packed = bool(args.pack_weights) if args.compile else packs_weights(self.target, args.pack_weights)
        self._packed: Target | None = None  # kept from decoder to decoder
        self.drafter = self._load_drafter(args)
        self._link: GlooLink | None = None
        self.decoder = self._new_decoder(args, self.drafter)
        self.conversation = Conversation(self.tokenizer, system=args.system, is_raw=args.raw)
        self._plain: Decoder | None = None
        self._last: Reply | None = None
        self._plain_speed: float | None = None
        self._model_settings: dict[str, Any] = {}  # as last shown
        self._set_aside: dict[str, Any] = {}  # options of heads, while there are none

    def _load_drafter(self, args: GenerateArguments) -> Drafter | None:
        adapter = find_merged_adapter(self.target)
        drafter = load_drafter(
            self.target,
            self.tokenizer,
            heads=args.heads,
            drafter_model=args.drafter_model,
            staged=args.staged,
            ngrams=args.ngrams,
            vocabulary=args.vocabulary,
        )
        if find_merged_adapter(self.target) != adapter:  # these weights are no longer the packed ones
            self._packed = None
        return drafter

    def _new_decoder(self, args: GenerateArguments, drafter: Drafter | None) -> Decoder | DistributedDecoder:
        if args.distributed:
            decoder = DistributedDecoder(self.target, drafter, link=self._link)
            self._link = decoder.link
            return decoder
        execution = {name: getattr(args, name) for name in ("compile", "batch_invariant")}
        drafting = {} if drafter is None else {"tree": args.tree, "acceptance": args.acceptance}
        if self._is_packed and self._packed is None:
            self._packed = self.target.with_packed_weights()
        return Decoder(self._packed or self.target, drafter, **drafting, **execution)

    def change(self, **options: Any) -> None:
        """Goes on with other options (names as in `GenerateArguments`), in the same conversation.

        Raises:
            ValueError, OSError: they cannot work; nothing is changed.
        """
        args = replace(self.args, **options)
        drafter = self._load_drafter(args) if args.heads != self.args.heads else self.drafter
        if {"heads", "tree"} & options.keys():
            self.decoder, self._plain = self._new_decoder(args, drafter), None
        self.args, self.drafter = args, drafter

    def change_heads(self, heads: str | None) -> None:
        """Drafts with other heads, or without: options that only heads have then wait for the next ones.

        Raises:
            ValueError, OSError: as `change`.
        """
        if heads is not None:
            self.change(heads=heads, **self._set_aside)
            self._set_aside = {}
        elif self.args.heads is not None:
            without: dict[str, Any] = {"draft_vocab_size": None, "draft_vocab_data": []}
            without |= {"tree": None, "compare": False, "acceptance": "exact"}
            given = {name: getattr(self.args, name) for name in without}
            self.change(heads=None, **without)
            self._set_aside = given

    def close(self) -> None:
        """Ends the servers of --distributed."""
        if self._link is not None:
            self._link.close()

    def reset(self) -> None:
        """Begins a new conversation."""
        self.conversation.reset()
        self._last = None

    def reply(self, turn: str) -> None:
        """Prints the reply as it is decoded, and keeps it in the conversation.

        Raises:
            ValueError: it cannot be decoded, usually because the conversation has become too long. The turn is dropped.
        """
        if not self.is_chat:
            self.conversation.reset()
        before = list(self.conversation.messages)
        try:
            self._decode(self.conversation.ask(turn).to(self.target.device))
        except BaseException:
            self.conversation.messages = before
            raise
        if self.args.compare:
            self.compare()

    def _decode(self, input_ids: Tensor) -> None:
        options = self.args.generate_kwargs()
        if options["do_sample"] and options["seed"] is None:
            options["seed"] = secrets.randbits(31)  # for a comparison
        self._note_model_settings(options)
        options["tokenizer"] = self.tokenizer  # for stop strings of the target's generation config
        printer, is_whole = ReplyPrinter(self.tokenizer, self.console), True
        own: dict[str, Any] = {}
        if isinstance(self.decoder, Decoder):
            own["reuse_cache"] = self.is_chat and self.decoder.holds_text
        stream = self.decoder.stream(input_ids, torch.ones_like(input_ids), **own, **options)
        with stream, _noting_interrupts(self.is_chat) as is_interrupted:
            for tokens in stream:
                printer.add(tokens)
                if is_interrupted():
                    is_whole = False
                    break
        printer.finish()
        self.conversation.answer(printer.text)
        self._last = Reply(input_ids, printer.token_ids, options, stream.output.stats, is_whole)
        self._describe(self._last.stats)

    def _note_model_settings(self, options: dict[str, Any]) -> None:
        """Says what the target's generation config adds to the options, before the first reply and when it changes."""
        own = find_model_settings(self.target.model.generation_config, options)
        if own and own != self._model_settings:
            self.notes.print(describe_model_settings(own), style="dim", markup=False, soft_wrap=True)
        self._model_settings = own

    def _describe(self, stats: GenerationStats) -> None:
        has_color = not self.console.no_color and self.console.is_terminal
        line = describe(stats, has_drafter=self.drafter is not None, has_color=has_color)
        if self._plain_speed is not None and not self.args.compare:
            line.append(f" (plain decoding, when last compared: {self._plain_speed:.1f} tokens/s)")
        self.notes.print(line, soft_wrap=True)

    def compare(self) -> None:
        """Decodes the last reply's prompt plainly, with the same seed, and says whether the texts are the same.

        Raises:
            ValueError: there is nothing to compare.
        """
        if self._last is None or self.drafter is None:
            missing = "a drafter: choose one with /heads" if self.drafter is None else "a reply: ask something first"
            raise ValueError(f"/compare needs {missing}")
        if self._plain is None:
            beside = self.decoder  # whose weights it reads, packed or not, and whose graphs
            is_local = isinstance(beside, Decoder)
            target = beside.target if is_local else self.target
            self._plain = Decoder(target, compile=self.args.compile and beside, batch_invariant=False)
        found = compare_with_plain(self._last, self._plain, self.tokenizer)
        self._plain_speed = speed_of(found.stats)
        keeps_text = self.args.acceptance == "exact" or not self._last.options["do_sample"]
        self.notes.print(Text(found.text, style="red" if found.is_fault and keeps_text else ""), soft_wrap=True)
        if found.plain is not None:
            self.notes.print(Text(without_escapes(found.plain), style="dim"), soft_wrap=True)
            if not keeps_text:
                self.notes.print(f"--acceptance {self.args.acceptance} does not keep the text of plain decoding")


@contextmanager
def _noting_interrupts(is_chat: bool) -> Iterator[Callable[[], bool]]:
    """In a chat, the first Ctrl-C is noted, so that the running step ends and the cache stays usable. A second one
    interrupts the step."""
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    if not is_chat:
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)
