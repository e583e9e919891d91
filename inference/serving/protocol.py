"""Requests in OpenAI's shapes, with vLLM's further options and this server's own. Unknown fields are errors.

A field that is present has an effect. What this server cannot do is refused (`reply_maker.py`), except for values
that ask for nothing, such as `"echo": false`.
"""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 16


class Strict(BaseModel):
    """Refuses fields that it does not have, and values of another type. null is the default, as in OpenAI's schema."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class StreamOptions(Strict):
    include_usage: bool = False


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message. Its further fields are the chat template's business (`tool_calls`, `name`, ...).

    Only the assistant's content may be null or missing, as beside tool calls.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[TextPart] | None = None
    refusal: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _refuse_media(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise ValueError(
                    f"a part is of type {kind!r}: this server reads text; draftsmith.generate reads images"
                )
        return content

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role!r} has no content: give text, or a list of text parts")
        return self


class CompletionOptions(Strict):
    """What both kinds of requests have."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    user: str | None = None
    # vLLM's
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    stop_token_ids: list[int] | None = Field(None, max_length=256)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    # this server's
    heads: str | None = None
    tree: str | None = Field(None, max_length=64)
    draft_report: bool = False
    learn: bool = True


class ChatRequest(CompletionOptions):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _need_logprobs(cls, number: int | None, others: ValidationInfo) -> int | None:
        if number and not others.data.get("logprobs"):
            raise ValueError(f"it is {number}, and logprobs is not set: set logprobs to true")
        return number

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(CompletionOptions):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def num_top(self) -> int | None:
        return self.logprobs
