"""From a request's options to replies: transformers' arguments, checked against the server's limits."""

import math
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor

from draftsmith.inference.drafters.base import Drafter
from draftsmith.inference.noise import row_seeds
from draftsmith.inference.request.chat_template import encode_prompt
from draftsmith.inference.request.generate_arguments import make_request
from draftsmith.inference.request.request import Request
from draftsmith.inference.request.text_processors import OccurrencePenalties
from draftsmith.inference.serving.errors import RequestError
from draftsmith.inference.serving.grammar import Grammars
from draftsmith.inference.serving.protocol import (
    MAX_STOP_LENGTH,
    MAX_STOPS,
    ChatRequest,
    CompletionOptions,
    CompletionRequest,
)
from draftsmith.inference.serving.reply import Reply, StopStrings
from draftsmith.inference.serving.scheduler import LaneName
from draftsmith.inference.streaming.detokenizer import IncrementalDetokenizer
from draftsmith.inference.streaming.token_texts import TokenTexts
from draftsmith.inference.targets.target import Target
from draftsmith.inference.trees.options import resolve_policy

MAX_TREE_NODES, MAX_TREE_DEPTH = 64, 16
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
# Files are not for requests. Trees that are chosen keep what they learn of each set of sizes: there are two.
TREE_NAMES = re.compile(r"auto|gamma|(dynamic|chain)(:\d{1,4}(,\d{1,4})*)?")


class ReplyMaker:
    """Makes the replies of requests. For any thread.

    Args:
        drafters: by name, the default first.
        max_length: tokens of a reply, prompt included.
    """

    def __init__(
        self, target: Target, tokenizer: Any, drafters: Mapping[str, Drafter | None], *, max_length: int
    ) -> None:
        self.target, self.tokenizer, self.drafters = target, tokenizer, dict(drafters)
        self.max_length = min(max_length, target.max_length or max_length)
        self.grammars = Grammars(target, tokenizer)
        self.token_texts = TokenTexts(tokenizer)
        self._one_at_a_time = threading.Lock()  # transformers' generate reads and copies the model's config

    def encode_chat(self, body: ChatRequest) -> list[int]:
        """The prompt of a conversation."""
        if not self.tokenizer.chat_template:
            raise RequestError("the target's tokenizer has no chat template: use /v1/completions")
        if body.tool_choice == "auto" and not body.tools:
            raise RequestError("tool_choice is given without tools: give tools, or leave it out", param="tool_choice")
        messages = [message.model_dump(exclude_unset=True) for message in body.messages]
        tools = None if body.tool_choice == "none" else body.tools
        try:
            return encode_prompt(self.tokenizer, messages, tools=tools, variables=body.chat_template_kwargs)
        except ValueError as error:
            raise RequestError(str(error), param=getattr(error, "field", "messages")) from error

    def encode_prompts(self, body: CompletionRequest) -> Iterator[list[int]]:
        """The prompts of a completion, as token ids."""
        is_one = isinstance(body.prompt, str) or (bool(body.prompt) and isinstance(body.prompt[0], int))
        given = cast(list[str | list[int]], [body.prompt] if is_one else body.prompt)
        for each in given or [[]]:
            prompt = list(self.tokenizer(each)["input_ids"]) if isinstance(each, str) else each
            if not prompt:
                raise RequestError("the prompt is empty: give at least one token", param="prompt")
            for token in prompt:
                self._check_token(token, "prompt")
            yield prompt

    def _check_token(self, token: int, param: str) -> None:
        if not 0 <= token < self.target.num_embeddings:
            raise RequestError(
                f"{param} has the token id {token}; the target's are 0 to {self.target.num_embeddings - 1}", param=param
            )

    def choose_lane(self, body: CompletionOptions) -> LaneName:
        """The drafter and tree of a request."""
        name = body.heads if body.heads is not None else next(iter(self.drafters))
        if name not in self.drafters:
            raise RequestError(f"heads is {name!r}; this server has {', '.join(self.drafters)}", param="heads")
        drafter, tree = self.drafters[name], body.tree
        if tree is None:
            return name, None
        if drafter is None:
            raise RequestError("tree is given, and plain decoding has no drafts: leave it out", param="tree")
        if TREE_NAMES.fullmatch(tree) is None:
            raise RequestError(
                f"tree is {tree!r}; allowed are auto, gamma, dynamic, dynamic:DEPTH,TOP_K,NODES, chain and "
                "chain:LENGTH",
                param="tree",
            )
        try:
            policy = resolve_policy(tree, drafter.max_depth)
        except (ValueError, TypeError) as error:
            raise RequestError(str(error).partition("\n")[0], param="tree") from error
        numbers = [int(number) for number in re.findall(r"\d+", tree)]
        if max([policy.num_nodes, *numbers]) > MAX_TREE_NODES or policy.max_depth > MAX_TREE_DEPTH:
            raise RequestError(
                f"tree is {tree!r}; allowed are at most {MAX_TREE_NODES} nodes, {MAX_TREE_NODES} children and "
                f"{MAX_TREE_DEPTH} levels",
                param="tree",
            )
        if drafter.drafts_chains_only and not policy.is_narrow:
            raise RequestError(f"tree is {tree!r}, and these heads draft chains only: use chain", param="tree")
        return name, tree

    def make_replies(self, prompt: list[int], body: ChatRequest | CompletionRequest) -> list[Reply]:
        """The `n` replies of one prompt.

        Raises:
            RequestError: options that this target or server cannot honour.
        """
        num_new = self._count_new_tokens(len(prompt), body)
        stops = self._find_stops(body)
        for token in body.stop_token_ids or ():
            self._check_token(token, "stop_token_ids")
        arguments = self._arguments(num_new, body)
        seed = secrets.randbits(63) if body.seed is None else body.seed
        seeds = row_seeds(seed, body.n, self.target.device)
        # A chat's reply begins a text; a completion goes on with the prompt's.
        context = self.token_texts.context_after(prompt) if isinstance(body, CompletionRequest) else []
        return [
            Reply(
                self._make_request(prompt, arguments, body),
                seeds[number : number + 1],
                IncrementalDetokenizer(self.tokenizer, context),
                StopStrings(stops),
                num_top=body.num_top,
                min_tokens=body.min_tokens,
                may_learn=body.learn,
            )
            for number in range(body.n)
        ]

    def _make_request(self, prompt: list[int], arguments: dict[str, Any], body: CompletionOptions) -> Request:
        input_ids: Tensor = torch.tensor([prompt])
        kwargs = arguments | {"logits_processor": self._processors(len(prompt), body)}
        try:
            with self._one_at_a_time:
                # Stop strings end the text (`Reply.stops`), not the tokens.
                request = make_request(self.target, input_ids, torch.ones_like(input_ids), stop_strings=[], **kwargs)
        except ValueError as error:
            raise RequestError(str(error).partition("\n")[0]) from error
        # Here and not as an argument of generate, which wants at least one token.
        request.end_at(self._find_ends(body))
        return request

    def _find_ends(self, body: CompletionOptions) -> list[int]:
        """The tokens that end a text."""
        own = self.target.model.generation_config.eos_token_id
        ends = [] if body.ignore_eos or own is None else [own] if isinstance(own, int) else [*own]
        return ends + (body.stop_token_ids or [])

    def _count_new_tokens(self, prompt_length: int, body: CompletionOptions) -> int:
        room = self.max_length - prompt_length
        asked = body.max_tokens
        if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
            if asked not in (None, body.max_completion_tokens):
                raise RequestError("max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")
            asked = body.max_completion_tokens
        if asked is None:
            asked = min(DEFAULT_COMPLETION_TOKENS, room) if isinstance(body, CompletionRequest) else room
        if room < max(1, asked):
            raise RequestError(
                f"the prompt has {prompt_length} tokens and the reply may have {max(1, asked)}; this server reads and "
                f"writes at most {self.max_length} together: shorten the prompt, or lower max_tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if body.min_tokens > asked:
            raise RequestError(
                f"min_tokens is {body.min_tokens}, and the reply has at most {asked} tokens: lower it",
                param="min_tokens",
            )
        return asked

    def _find_stops(self, body: CompletionOptions) -> list[str]:
        """The request's stop strings, else those of the model's generation config."""
        if body.stop is None:
            own: str | list[str] | None = self.target.model.generation_config.stop_strings
            return [own] if isinstance(own, str) else own or []
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
        if len(stops) > MAX_STOPS or not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
            raise RequestError(
                f"stop takes at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters", param="stop"
            )
        return stops

    def _arguments(self, num_new: int, body: CompletionOptions) -> dict[str, Any]:
        """Arguments of transformers' generate. What the request leaves out is the model's generation config's, and
        else OpenAI's default. All are given, neutral ones too: for an argument that is missing, transformers takes the
        model's own."""
        config = self.target.model.generation_config

        def choose(name: str, default: Any) -> Any:
            given = getattr(body, name)
            given = getattr(config, name, None) if given is None else given
            return default if given is None else given

        temperature = choose("temperature", 1.0)
        arguments: dict[str, Any] = {"max_new_tokens": num_new, "do_sample": temperature > 0}
        if temperature > 0:
            arguments["temperature"] = float(temperature)
            arguments["top_p"] = float(choose("top_p", 1.0))
            arguments["top_k"] = max(0, choose("top_k", 0))
            arguments["min_p"] = float(choose("min_p", 0.0)) or None  # 0.0 would make a warper that does nothing
        arguments["repetition_penalty"] = float(choose("repetition_penalty", 1.0))
        if body.logit_bias is not None:
            biases = [[[token], bias] for token, bias in self._read_bias(body.logit_bias)]
            arguments["sequence_bias"] = biases or None
        return arguments

    def _read_bias(self, bias: dict[str, float]) -> list[tuple[int, float]]:
        try:
            read = [(int(token), float(value)) for token, value in bias.items()]
        except ValueError:
            read = [(-1, 0.0)]
        if not all(0 <= token < self.target.vocab_size and math.fabs(value) <= 100 for token, value in read):
            raise RequestError(
                f"logit_bias takes token ids from 0 to {self.target.vocab_size - 1} with biases from -100 to 100",
                param="logit_bias",
            )
        return read

    def _processors(self, prompt_length: int, body: CompletionOptions) -> list[Any]:
        processors: list[Any] = []
        if body.presence_penalty or body.frequency_penalty:
            begin = torch.tensor(prompt_length, device=self.target.device)
            processors.append(OccurrencePenalties(body.presence_penalty, body.frequency_penalty, begin))
        if body.min_tokens and (ends := self._find_ends(body)):
            least = MinNewTokensLengthLogitsProcessor(
                prompt_length, body.min_tokens, ends, device=str(self.target.device)
            )
            processors.append(least)
        return [*processors, *self.grammars.read(body.response_format)]
