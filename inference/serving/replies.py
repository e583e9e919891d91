"""Replies in OpenAI's shapes: whole responses, and chunks of a stream."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from draftsmith.inference.serving.protocol import ChatRequest, CompletionOptions
from draftsmith.inference.serving.reply import DraftedStep, Piece, Reply, ReplyToken
from draftsmith.inference.streaming.token_texts import TokenTexts


class ReplyWriter:
    """Writes the replies of one request.

    Args:
        replies: of all choices, in their order.
        metrics: what is told of the drafts: none, summary or detailed.
    """

    def __init__(
        self, body: CompletionOptions, replies: Sequence[Reply], model: str, token_texts: TokenTexts, metrics: str
    ) -> None:
        self.metrics = metrics
        self.body, self.replies, self.model, self.token_texts = body, replies, model, token_texts
        self.is_chat = isinstance(body, ChatRequest)
        self._head = {
            "id": ("chatcmpl-" if self.is_chat else "cmpl-") + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
        }
        self._begun: set[int] = set()
        self._scored: set[int] = set()  # choices with log-probabilities so far
        self._offsets = [0] * len(replies)  # of the text so far, for completions' text_offset

    def usage(self) -> dict[str, int]:
        # The n replies of a prompt share it.
        prompt = sum(len(reply.prompt) for reply in self.replies[:: self.body.n])
        new = sum(len(reply.row.new) for reply in self.replies)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """The stream's chunks for one piece; the last piece of a choice has a chunk of its own for the end."""
        chunks = []
        if self.is_chat and index not in self._begun:
            chunks.append(self._chunk(self._choice(index, {"role": "assistant", "content": ""}, None, None)))
            self._begun.add(index)
        if piece.text or piece.tokens:
            delta: Any = {"content": piece.text} if self.is_chat else piece.text
            chunk = self._chunk(self._choice(index, delta, self._logprobs(index, piece.tokens), None))
            if self.body.draft_report:
                chunk["drafting"] = {"tokens": [_report_token(token) for token in piece.tokens]}
            chunks.append(chunk)
        if piece.finish_reason is not None:
            chunk = self._chunk(self._choice(index, {} if self.is_chat else "", None, piece.finish_reason))
            if self.body.draft_report:
                chunk["drafting"] = summarise(self.replies[index])
            chunks.append(chunk)
        return chunks

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._chunk(), "usage": self.usage(), **self._metrics()}

    def _metrics(self) -> dict[str, Any]:
        """What drafting did, where and as vLLM reports it."""
        if self.metrics == "none":
            return {}
        one = self.replies[0] if len(self.replies) == 1 and self.replies[0].drafts else None
        drafting = None if one is None else describe_drafting(one.drafts, is_detailed=self.metrics == "detailed")
        return {"metrics": {"speculative_decoding": drafting}}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        chunk: dict[str, Any] = {**self._head, "object": kind, "choices": list(choices)}
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            chunk["usage"] = None
        return chunk

    def _choice(self, index: int, delta: Any, logprobs: Any, reason: str | None) -> dict[str, Any]:
        name = "delta" if self.is_chat else "text"
        return {"index": index, name: delta, "logprobs": logprobs, "finish_reason": reason}

    def response(self, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """The whole response from each choice's pieces."""
        choices = []
        for index, own in enumerate(pieces):
            text = "".join(piece.text for piece in own)
            logprobs = self._logprobs(index, [token for piece in own for token in piece.tokens])
            choice = {"index": index, "logprobs": logprobs, "finish_reason": own[-1].finish_reason}
            message = {"role": "assistant", "content": text, "refusal": None}
            choices.append(choice | ({"message": message} if self.is_chat else {"text": text}))
        kind = "chat.completion" if self.is_chat else "text_completion"
        response = {**self._head, "object": kind, "choices": choices, "usage": self.usage(), **self._metrics()}
        if self.body.draft_report:
            response["drafting"] = summarise(*self.replies)
        return response

    def _logprobs(self, index: int, tokens: Sequence[ReplyToken]) -> dict[str, Any] | None:
        """Of all tokens but the one that ends the text, which is not shown."""
        if self.replies[index].num_top is None:
            return None
        ends = self.replies[index].row.end_ids
        entries, by_text, offsets = [], [], []
        for token in tokens:
            if token.id in ends:
                continue
            is_first = index not in self._scored and not self.replies[index].detokenizer.context
            self._scored.add(index)
            top = [self._score(*each, is_first=is_first) for each in token.top]
            entries.append({**self._score(token.id, token.logprob, is_first=is_first), "top_logprobs": top})
            by_text.append(_key_by_text([token_id for token_id, _ in token.top], top))
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token.text)
        if self.is_chat:
            return {"content": entries, "refusal": None}
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": by_text,
            "text_offset": offsets,
        }

    def _score(self, token_id: int, logprob: float | None, *, is_first: bool) -> dict[str, Any]:
        text, own_bytes = self.token_texts.read(token_id, is_first=is_first)
        return {"token": text, "logprob": logprob, "bytes": list(own_bytes)}


def _key_by_text(token_ids: Sequence[int], top: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The likeliest tokens, the best first, as completions have them; a text that is taken becomes `token_id:ID`."""
    found: dict[str, float] = {}
    for token_id, entry in zip(token_ids, top, strict=True):
        found.setdefault(f"token_id:{token_id}" if entry["token"] in found else entry["token"], entry["logprob"])
    return found


def _report_token(token: ReplyToken) -> dict[str, Any]:
    return {"id": token.id, "text": token.text, "depth": token.depth, "probability": token.probability}


def describe_drafting(drafts: Sequence[DraftedStep], *, is_detailed: bool) -> dict[str, Any]:
    """vLLM's `metrics.speculative_decoding`. A draft is as long as its tree is deep, and all nodes are draft tokens."""
    depth = max(draft.depth for draft in drafts)
    drafted, accepted = (sum(values) for values in list(zip(*drafts, strict=True))[1:])
    lengths = {length: [0] * (length + 1) for length in sorted({draft.depth for draft in drafts})}
    for draft in drafts:
        lengths[draft.depth][draft.num_accepted] += 1
    histogram = [sum(counts[num] for counts in lengths.values() if num < len(counts)) for num in range(depth + 1)]
    described: dict[str, Any] = {
        "mean_acceptance_length": 1 + accepted / len(drafts),
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_histogram": histogram,
        "acceptance_histogram_by_draft_length": {str(length): counts for length, counts in lengths.items()},
        "num_spec_steps": len(drafts),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": depth,
    }
    if is_detailed:
        described["per_step_accepted"] = [draft.num_accepted for draft in drafts]
        described["per_step_drafted"] = [draft.num_drafted for draft in drafts]
    return described


def summarise(*replies: Reply) -> dict[str, Any]:
    """What drafting did for some replies, together."""
    stats = sum((reply.stats for reply in replies[1:]), replies[0].stats)
    starts = [reply.started for reply in replies if reply.started is not None]
    ends = [reply.ended for reply in replies if reply.ended is not None]
    return {
        "acceptance_length": stats.acceptance_length,
        "num_steps": stats.num_verify_steps,
        "accepted_per_depth": stats.accepted_per_depth,
        "seconds": max(ends) - min(starts) if starts and ends else 0.0,
    }
