"""Lets a target write its own training conversations.

Heads learn to predict the target, so the target's own texts teach them more than people's. The target either answers
the user turns of given conversations, with its own earlier replies in the context, or writes both sides, beginning with
only the user header of the chat template (Magpie, arXiv 2406.08464).

The seed of a turn comes from the run's seed, the conversation's id and the turn's place, so the order does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from draftsmith.training.synthesis.prompts import Conversation
from draftsmith.training.synthesis.reply_decoding import turn_seed
from draftsmith.training.synthesis.reply_sources import ReplySource, TurnRequest


class Synthesizer:
    """Writes conversations turn by turn, as many at a time as the capacity of its source.

    A useless turn ends its conversation, which keeps its messages up to the last reply; with `keep_truncated` also a
    reply that was cut at the length limit, marked so that training does not learn its end.
    """

    def __init__(self, source: ReplySource, *, seed: int, keep_truncated: bool = False) -> None:
        self.source, self.seed, self.keep_truncated = source, seed, keep_truncated
        self._owners: dict[TurnRequest, Conversation] = {}

    def write(self, conversations: Iterable[Conversation]) -> Iterator[list[Conversation]]:
        """Yields finished conversations in the order of completion."""
        waiting = iter(conversations)
        requests: list[TurnRequest] = []
        while True:
            while len(self._owners) < self.source.capacity and (conversation := next(waiting, None)) is not None:
                requests += self._request_next(conversation)
            if not self._owners:
                return
            replies = self.source.exchange(requests)
            requests, finished = [], []
            for request, reply in replies:
                conversation = self._owners.pop(request)
                is_cut = reply.problem == "truncated" and request.role == "assistant" and self.keep_truncated
                if is_cut or not reply.problem:
                    conversation.add_turn(request.role, reply.text, reply.num_tokens, reply.thoughts, is_cut=is_cut)
                if reply.problem:
                    conversation.end(f"{request.role} turn {reply.problem}")
                following = self._request_next(conversation)
                requests += following
                if not following:
                    finished.append(conversation)
            yield finished

    def _request_next(self, conversation: Conversation) -> list[TurnRequest]:
        """Returns the request for the conversation's next turn; [] at its end."""
        role = conversation.next_role()
        if role is None:
            return []
        place = len(conversation.messages)
        seed = turn_seed(self.seed, conversation.id, place)
        request = TurnRequest([*conversation.messages], role, seed, conversation.tools)
        self._owners[request] = conversation
        return [request]
