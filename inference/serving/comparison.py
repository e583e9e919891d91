"""What the chat page asks where two replies of one conversation differ: does rounding explain it?"""

from typing import Any

from pydantic import Field

from draftsmith.inference.prefix_cache import count_shared
from draftsmith.inference.serving.errors import RequestError
from draftsmith.inference.serving.protocol import ChatRequest, Message, Strict
from draftsmith.inference.serving.reply_maker import ReplyMaker
from draftsmith.inference.text_difference import judge

CURES = ("--batch_invariant true", "--dtype float32")  # options of the server


class DifferenceRequest(Strict):
    """The body of /v1/difference.

    Attributes:
        messages, temperature, seed: of the requests for both replies.
        texts: token ids of two replies, of which neither is the other's beginning.
    """

    messages: list[Message] = Field(min_length=1)
    temperature: float = Field(ge=0, le=100, allow_inf_nan=False)
    seed: int = Field(ge=-(2**63), lt=2**63)
    texts: list[list[int]] = Field(min_length=2, max_length=2)


def describe_difference(maker: ReplyMaker, body: DifferenceRequest) -> dict[str, Any]:
    """`is_near_tie`, and sentences with the target's scores of the two tokens (see `judge`)."""
    target = maker.target
    place = count_shared(body.texts)
    if place == min(map(len, body.texts)):
        raise RequestError("neither text may be the beginning of the other: give two that differ", param="texts")
    if not all(0 <= token < target.vocab_size for text in body.texts for token in text):
        raise RequestError(f"texts has token ids; the target's are 0 to {target.vocab_size - 1}", param="texts")
    chat = ChatRequest.model_validate({**body.model_dump(exclude={"texts"}, exclude_unset=True), "max_tokens": 1})
    prompt = [*maker.encode_chat(chat), *body.texts[0][:place]]
    (reply,) = maker.make_replies(prompt, chat)
    tokens = body.texts[0][place], body.texts[1][place]
    found = judge(target, reply.request, place, tokens, seed=reply.row_seed.tolist())
    return {"is_near_tie": found.is_near_tie, "text": found.explain(CURES)}
