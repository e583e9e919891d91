"""Grammars: replies that must be JSON, by the `xgrammar` library where it is installed."""

import json
import threading
from typing import Any

from draftsmith.inference.serving.errors import RequestError
from draftsmith.inference.serving.json_schemas import find_ignored
from draftsmith.inference.targets.target import Target

INSTALL_HINT = "pip install xgrammar on the server"
MAX_SCHEMA = 16_384  # characters; the time of compiling grows with the square of the properties


class Grammars:
    """Logits processors for `response_format`. Compiled schemas are kept, up to a size, for later requests."""

    CACHE_BYTES = 64 << 20
    PATIENCE_SECONDS = 2.0  # for other schemas to be compiled; requests that wait hold a thread each

    def __init__(self, target: Target, tokenizer: Any) -> None:
        self._target, self._tokenizer = target, tokenizer
        self._compiler: Any = None
        self._lock = threading.Lock()

    def read(self, response_format: dict[str, Any] | None) -> list[Any]:
        """The processors of one reply: one, or none for plain text. A processor serves one reply only."""
        if response_format is None:
            return []
        kind = response_format.get("type")
        known = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
        if not isinstance(kind, str) or kind not in known:
            raise RequestError(
                f"response_format has the type {kind!r}; allowed are {', '.join(known)}", param="response_format"
            )
        if more := response_format.keys() - known[kind]:
            raise RequestError(f"response_format {kind} has no {min(more)}: leave it out", param="response_format")
        if kind == "text":
            return []
        schema = {"type": "object"} if kind == "json_object" else _read_schema(response_format)
        try:
            from xgrammar.contrib.hf import LogitsProcessor
        except ImportError as error:
            raise RequestError(
                f"response_format {kind} needs the xgrammar library: {INSTALL_HINT}, or leave it out",
                param="response_format",
            ) from error
        return [LogitsProcessor(self._compile(schema))]

    def _compile(self, schema: dict[str, Any]) -> Any:
        if not self._lock.acquire(timeout=self.PATIENCE_SECONDS):
            raise RequestError("other schemas are being compiled: try again", status=429)
        try:
            if self._compiler is None:
                self._compiler = self._new_compiler()
            try:
                # A small model can write spaces for ever where a grammar allows them.
                return self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
            except (RuntimeError, ValueError) as error:
                first_line = str(error).strip().partition("\n")[0]
                raise RequestError(f"xgrammar refuses the schema: {first_line}", param="response_format") from error
        finally:
            self._lock.release()

    def _new_compiler(self) -> Any:
        import xgrammar

        vocab_size = self._target.vocab_size
        ends = getattr(self._target.model.generation_config, "eos_token_id", None)
        info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=vocab_size, stop_token_ids=ends)
        return xgrammar.GrammarCompiler(info, cache_limit_bytes=self.CACHE_BYTES)


def _read_schema(response_format: dict[str, Any]) -> dict[str, Any]:
    holder = response_format.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict):
        raise RequestError(
            'response_format json_schema has no schema: give {"type": "json_schema", "json_schema": {"name": '
            '..., "schema": {...}}}',
            param="response_format",
        )
    try:
        length, ignored = len(json.dumps(schema)), next(find_ignored(schema), None)
    except RecursionError as error:
        raise RequestError("the schema is nested too deeply", param="response_format") from error
    if length > MAX_SCHEMA:
        raise RequestError(f"the schema has {length} characters; allowed are {MAX_SCHEMA}", param="response_format")
    if ignored:
        raise RequestError(
            f"the reply could break the schema, because grammars here cannot honour {ignored}: leave it out",
            param="response_format",
        )
    return schema
