"""Lets a target write its own training conversations.

Heads learn to predict the target, so the target's own texts teach them more than people's. The target either answers
the user turns of given conversations, with its own earlier replies in the context, or writes both sides, beginning with
only the user header of the chat template (Magpie, arXiv 2406.08464).

The seed of a turn comes from the run's seed, the conversation's id and the turn's place, so the order does not matter.
"""

from collections.abc import Iterable, Iterator

from draftsmith.training.synthesis.prompts import Conversation
from draftsmith.training.synthesis.reply_decoding import turn_seed
from draftsmith.training.synthesis.reply_sources import ReplySource, TurnRequest


def synthesize(
    source: ReplySource, conversations: Iterable[Conversation], *, seed: int, keep_truncated: bool = False
) -> Iterator[list[Conversation]]:
    """Writes conversations turn by turn, as many at a time as the capacity of the source, and yields finished ones in
    the order of completion.

    A useless turn ends its conversation, which keeps its messages up to the last reply; with `keep_truncated` also a
    reply that was cut at the length limit, marked so that training does not learn its end.
    """
    waiting = iter(conversations)
    owners: dict[TurnRequest, Conversation] = {}

    def request_next(conversation: Conversation) -> list[TurnRequest]:
        """The request for the conversation's next turn; [] at its end."""
        if (role := conversation.next_role()) is None:
            return []
        own_seed = turn_seed(seed, conversation.id, len(conversation.messages))
        request = TurnRequest([*conversation.messages], role, own_seed, conversation.tools)
        owners[request] = conversation
        return [request]

    requests: list[TurnRequest] = []
    while True:
        while len(owners) < source.capacity and (conversation := next(waiting, None)) is not None:
            requests += request_next(conversation)
        if not owners:
            return
        replies = source.exchange(requests)
        requests, finished = [], []
        for request, reply in replies:
            conversation = owners.pop(request)
            is_cut = reply.problem == "truncated" and request.role == "assistant" and keep_truncated
            if is_cut or not reply.problem:
                conversation.add_turn(request.role, reply.text, reply.num_tokens, reply.thoughts, is_cut=is_cut)
            if reply.problem:
                conversation.end(f"{request.role} turn {reply.problem}")
            following = request_next(conversation)
            requests += following
            if not following:
                finished.append(conversation)
        yield finished
