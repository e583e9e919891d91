"""The HTTP side of a server: OpenAI's routes, Prometheus metrics and the chat page.

A request becomes replies, which the scheduler's thread decodes. Their pieces come back through an asyncio queue. When a
client goes away, its replies are cancelled and leave before the engine's next step.
"""

import asyncio
import hmac
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from draftsmith.inference.serving.comparison import DifferenceRequest, describe_difference
from draftsmith.inference.serving.errors import RequestError
from draftsmith.inference.serving.protocol import ChatRequest, CompletionRequest, Strict
from draftsmith.inference.serving.replies import ReplyWriter
from draftsmith.inference.serving.reply import Piece, Reply
from draftsmith.inference.serving.reply_maker import ReplyMaker
from draftsmith.inference.serving.scheduler import INTERNAL_ERROR, Scheduler

logger = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page" / "index.html"
MAX_BODY_BYTES = 4 << 20
OPEN_PATHS = ("/", "/health")  # without a key
SHOWN_ERRORS = 3
LAST_STEP_SECONDS = 10.0  # for the engine to end; it may be compiling
GONE = 499  # nobody reads it: the client went away

Body = TypeVar("Body", bound=Strict)


@dataclass(frozen=True)
class Server:
    """What the routes share."""

    scheduler: Scheduler
    maker: ReplyMaker
    model: str
    api_key: str | None
    metrics: str


def create_app(
    scheduler: Scheduler, tokenizer: Any, *, model: str, api_key: str | None = None, metrics: str = "summary"
) -> FastAPI:
    """The application. It starts the scheduler, and ends it when it is shut down.

    Args:
        model: the name under which clients know the target.
        api_key: that requests must carry as `Authorization: Bearer KEY`; None = no key.
        metrics: what replies tell of their drafts: none, summary or detailed.
    """
    maker = ReplyMaker(scheduler.target, tokenizer, scheduler.drafters, max_length=scheduler.limits.max_length)
    server = Server(scheduler, maker, model, api_key, metrics)

    @asynccontextmanager
    async def run_engine(_: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        try:
            yield
        finally:
            scheduler.stop(0.0)
            await run_in_threadpool(scheduler.join, LAST_STEP_SECONDS)

    async def check_key(request: Request) -> None:
        # The scope's path is what is routed; `request.url` also reads the Host header.
        if server.api_key is not None and request.scope["path"] not in OPEN_PATHS:
            given = request.headers.get("authorization", "").encode("latin-1")  # as it is read
            if not hmac.compare_digest(given, f"Bearer {server.api_key}".encode()):
                raise RequestError("the API key is missing or wrong", status=401, code="invalid_api_key")

    app = FastAPI(lifespan=run_engine, dependencies=[Depends(check_key)], openapi_url=None)  # and so no page of its own
    app.state.server = server
    _add_error_handlers(app, server)
    _add_routes(app, server)
    return app


def _add_error_handlers(app: FastAPI, server: Server) -> None:
    @app.exception_handler(RequestError)
    async def refuse(_: Request, error: RequestError) -> Response:
        return _refuse(server, error)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {request.url.path}: {error.detail}"
        return _refuse(server, RequestError(text, status=error.status_code))

    @app.exception_handler(ClientDisconnect)
    async def leave(*_: Any) -> Response:
        return Response(status_code=GONE)

    @app.exception_handler(Exception)
    async def fail(_: Request, error: Exception) -> Response:
        logger.error("a request failed", exc_info=error)
        return JSONResponse(RequestError(INTERNAL_ERROR, status=500).body, 500)


def _refuse(server: Server, error: RequestError) -> Response:
    server.scheduler.metrics.refused.labels(error.status).inc()
    return JSONResponse(error.body, error.status, headers=error.headers)


def _add_routes(app: FastAPI, server: Server) -> None:
    @app.get("/health")
    async def health() -> Response:
        is_well = server.scheduler.is_running
        return JSONResponse({"status": "ok" if is_well else "stopping"}, 200 if is_well else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.scheduler.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def describe_model() -> dict[str, Any]:
        return {
            "id": server.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "draftsmith",
            "root": getattr(server.scheduler.target.model, "name_or_path", "") or server.model,
            "max_model_len": server.maker.max_length,
            "draft_heads": list(server.maker.drafters),
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [describe_model()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        _check_model(server, name)
        return JSONResponse(describe_model())

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _reply(server, request, await _read_body(request, ChatRequest))

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await _reply(server, request, await _read_body(request, CompletionRequest))

    @app.get("/v1/learning")
    async def learning() -> Response:
        learner = server.scheduler.learner
        return JSONResponse({"learning": None if learner is None else asdict(learner.progress)})

    comparing = threading.Lock()  # each comparison is a pass beside the engine's, with a cache of its own

    @app.post("/v1/difference")
    async def explain(request: Request) -> Response:
        body = await _read_body(request, DifferenceRequest)
        if not comparing.acquire(blocking=False):
            raise RequestError("another comparison is running: try again", status=429, code="queue_full")
        try:
            return JSONResponse(await run_in_threadpool(describe_difference, server.maker, body))
        finally:
            comparing.release()

    @app.get("/")
    async def page() -> Response:
        return FileResponse(PAGE)


async def _read_body(request: Request, kind: type[Body]) -> Body:
    """The checked body."""
    # A page of another origin may send other types without asking the browser's leave.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError("the body must have the content type application/json", status=415)
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise RequestError(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413)
    try:
        return kind.model_validate_json(bytes(data))
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        places = [".".join(map(str, one["loc"])) for one in found]
        shown = [f"{place}: {one['msg']}" if place else one["msg"] for place, one in zip(places, found, strict=True)]
        more = f"; and {len(shown) - SHOWN_ERRORS} more" if len(shown) > SHOWN_ERRORS else ""
        raise RequestError("; ".join(shown[:SHOWN_ERRORS]) + more, param=places[0].partition(".")[0] or None) from error


def _check_model(server: Server, name: str) -> None:
    if name != server.model:
        raise RequestError(
            f"the model {name!r} does not exist; this server has {server.model!r}",
            status=404,
            param="model",
            code="model_not_found",
        )


async def _reply(server: Server, request: Request, body: ChatRequest | CompletionRequest) -> Response:
    if body.model is not None:
        _check_model(server, body.model)
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is for streams: set stream, or leave it out", param="stream_options")
    events: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def send(index: int, piece: Piece) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(events.put_nowait, (index, piece))

    def make_replies() -> list[Reply]:
        replies: list[Reply] = []
        maker, limits = server.maker, server.scheduler.limits
        most = limits.max_rows + limits.max_waiting
        for prompt in [maker.encode_chat(body)] if isinstance(body, ChatRequest) else maker.encode_prompts(body):
            if len(replies) + body.n > most:
                raise RequestError(
                    f"the request asks for more than {most} replies: send several",
                    param="n" if body.n > 1 else "prompt",
                )
            replies += maker.make_replies(prompt, body)
        for index, reply in enumerate(replies):
            reply.on_piece = partial(send, index)
        return replies

    lane = server.maker.choose_lane(body)
    replies = await run_in_threadpool(make_replies)
    server.scheduler.submit(replies, lane)
    writer = ReplyWriter(body, replies, server.model, server.maker.token_texts, server.metrics)
    if body.stream:
        return StreamingResponse(_stream(writer, replies, events), media_type="text/event-stream")
    return await _collect(request, writer, replies, events)


async def _stream(
    writer: ReplyWriter, replies: Sequence[Reply], events: asyncio.Queue[tuple[int, Piece]]
) -> AsyncIterator[str]:
    left = len(replies)
    try:
        while left:
            index, piece = await events.get()
            left -= piece.is_last
            for chunk in writer.chunks(index, piece):
                yield f"data: {json.dumps(chunk)}\n\n"
            if piece.error is not None:
                yield f"data: {json.dumps(piece.error.body)}\n\n"
                return
        if writer.body.stream_options is not None and writer.body.stream_options.include_usage:
            yield f"data: {json.dumps(writer.usage_chunk())}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        for reply in replies:
            reply.cancel()


async def _collect(
    request: Request, writer: ReplyWriter, replies: Sequence[Reply], events: asyncio.Queue[tuple[int, Piece]]
) -> Response:
    pieces: list[list[Piece]] = [[] for _ in replies]

    async def collect() -> RequestError | None:
        while not all(own and own[-1].is_last for own in pieces):
            index, piece = await events.get()
            pieces[index].append(piece)
            if piece.error is not None:
                return piece.error
        return None

    collecting = asyncio.create_task(collect())
    leaving = asyncio.create_task(_wait_until_gone(request))
    try:
        await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=GONE)
        if (error := collecting.result()) is not None:
            return JSONResponse(error.body, error.status)
        return JSONResponse(writer.response(pieces))
    finally:
        collecting.cancel()
        leaving.cancel()
        for reply in replies:
            reply.cancel()


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
