"""OpenAI's API over HTTP: reads requests, runs them on a `Serving`, and answers them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from layerskip.serving import fields
from layerskip.serving.answers import Answer
from layerskip.serving.fields import ChatRequest, GenerationRequest, read
from layerskip.serving.metrics import Metrics
from layerskip.serving.openai_api import Served, answer_of
from layerskip.serving.requests import Piece, Refusal, TextRequest, refusing
from layerskip.serving.responses import ResponseAnswer, ResponseRequest, renamed
from layerskip.serving.scheduler import Serving
from layerskip.serving.served_texts import Text
from layerskip.serving.tokenization import detokenized, tokenized

RESPONSES = "/v1/responses"
BODY_SECONDS = 30.0  # time limit for a client to send the body of a request
_log = logging.getLogger(__name__)


def make_app(
    serving: Serving,
    served: Served,
    *,
    api_key: str | Sequence[str] | None = None,
    max_body: int = 4 << 20,
    timeout: float = 600.0,
    origins: Sequence[str] = (),
) -> FastAPI:
    """Make the application, which starts and stops the `Serving`.

    Args:
        api_key: the bearer token that clients must send, or several; None: none.
        max_body: maximum bytes of a request.
        timeout: maximum seconds of a request in total, including the reading of its answer.
        origins: sites whose pages may send requests, as "https://example.org"; "*": all.
    """
    served.context = min(served.context, serving.max_tokens)  # perhaps that of a second model
    metrics = Metrics(serving, served.name)
    # One thread only, since tokenizers may not be safe to use in parallel.
    encoding = ThreadPoolExecutor(1, thread_name_prefix="encoding")
    # Another one for prompts that run a vision tower or an encoder, which takes seconds.
    looking = ThreadPoolExecutor(1, thread_name_prefix="looking")

    keys = [api_key] if isinstance(api_key, str) else [*(api_key or ())]
    owners = {key.strip().encode(): owner_of(key) for key in keys}

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        serving.start()
        try:
            yield
        finally:
            await asyncio.to_thread(serving.stop)
            encoding.shutdown()
            looking.shutdown()

    async def check_key(request: Request) -> None:
        request.state.owner = ""
        if not owners or request.scope["endpoint"] in (health, root):
            return
        kind, _, shown = request.headers.get("authorization", "").partition(" ")
        # Compare in constant time, wherever the first difference is.
        given = shown.strip(" ").encode("latin-1")  # the bytes that the client has sent
        right = [owner for key, owner in owners.items() if secrets.compare_digest(given, key)]
        request.state.owner = "".join(right)
        if kind.lower() != "bearer" or not right:
            message = "this server needs its API key, as Authorization: Bearer KEY"
            raise Refusal(401, message, code="invalid_api_key")

    app = FastAPI(lifespan=life, openapi_url=None, dependencies=[Depends(check_key)])
    get = partial(app.api_route, methods=["GET", "HEAD"])
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=[*origins], allow_methods=["*"], allow_headers=["*"]
        )

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> Response:
        if request.url.path == RESPONSES:
            refusal = renamed(refusal)
        headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}
        status = refusal.status
        return JSONResponse(refusal.body(), status, headers=headers.get(status))

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def unknown(request: Request, error: Any) -> Response:
        message = f"{request.method} {request.url.path} is not served here"
        response = await refused(request, Refusal(error.status_code, message))
        response.headers.update(error.headers or {})  # which methods are allowed
        return response

    @app.exception_handler(500)
    async def failed(request: Request, error: Exception) -> Response:
        # Details are in the server's log; a client learns nothing about this machine.
        return await refused(request, Refusal(500, "the server failed to answer this request"))

    @get("/health")
    async def health() -> Response:
        if not serving.alive:
            return JSONResponse({"status": "the decoder thread stopped"}, 503)
        return JSONResponse({"status": "ok"})

    @get("/")
    async def root() -> Response:
        return JSONResponse({"message": "OpenAI's API is at /v1", "models": "/v1/models"})

    @get("/metrics")
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    card = {"id": served.name, "object": "model", "created": int(time.time())}
    card |= {"owned_by": "layerskip", "max_model_len": served.context}

    @get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    @get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        served.check_name(name)
        return JSONResponse(card)

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        raise Refusal(400, f"{served.name} generates text; embeddings are not served here")

    @get("/tokenizer_info")
    async def about_tokenizer() -> Response:
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        return JSONResponse({name: getattr(served.tokenizer, name, None) for name in names})

    async def encoded(work: Callable[..., Any], body: Any) -> Any:
        long = served.encoder or any(each.pictures for each in getattr(body, "messages", ()))
        pool = looking if long else encoding
        return await asyncio.get_running_loop().run_in_executor(pool, work, body, served)

    def translate(
        path: str, kind: type[fields.Tokenize | fields.Detokenize], work: Callable[..., Any]
    ) -> None:
        @app.post(path)
        async def translated(request: Request) -> Response:
            body = read(kind, await _body(request, max_body))
            served.check_name(body.model)
            return JSONResponse(await encoded(work, body))

    translate("/tokenize", fields.Tokenize, tokenized)
    translate("/detokenize", fields.Detokenize, detokenized)

    def answering(path: str, kind: type[GenerationRequest | ResponseRequest]) -> None:
        @app.post(path)
        async def answered(request: Request) -> Response:
            with metrics.counting(path):
                deadline = asyncio.get_running_loop().time() + timeout
                given = read(kind, await _body(request, max_body))
                body = given.chat() if isinstance(given, ResponseRequest) else given
                serving.check_room(body.texts)  # before encoding anything
                answer = await encoded(answer_of, body)
                running = _Running(serving, metrics.observe)
                owner = request.state.owner
                await running.submit([replace(each.task, owner=owner) for each in answer.choices])
                reply = (
                    ResponseAnswer(given, answer) if isinstance(given, ResponseRequest) else answer
                )
                if body.stream:
                    return _Events(running, reply, deadline)
                with running.cancel_on_exit():
                    await _finish_or_disconnect(request, running, reply, deadline)
                return JSONResponse(reply.whole())

    answering("/v1/chat/completions", ChatRequest)
    answering("/v1/completions", fields.CompletionRequest)
    answering(RESPONSES, ResponseRequest)
    return app


def owner_of(key: str) -> str:
    """The owner of the texts that a key asks for, by a name that does not tell the key."""
    return hashlib.sha256(key.strip().encode()).hexdigest()[:16]


class _Running:
    """The tasks of one request: they report from their thread, and one coroutine reads."""

    def __init__(self, serving: Serving, counted: Callable[[TextRequest, Piece], None]) -> None:
        self._serving, self._counted = serving, counted
        self._loop = asyncio.get_running_loop()
        # By text, the piece not yet sent to the client; a slow reader gets larger pieces.
        self._pending: dict[int, Piece] = {}
        self._news = asyncio.Event()
        self._texts: dict[int, Text] = {}

    async def submit(self, tasks: Sequence[TextRequest]) -> None:
        """Submit all tasks or none."""
        telling = [(task, partial(self._tell, index, task)) for index, task in enumerate(tasks)]
        with refusing():
            # In a separate thread, since it may wait for the one that decodes.
            texts = await asyncio.to_thread(self._serving.submit_all, telling)
        self._texts = dict(enumerate(texts))

    def _tell(self, index: int, task: TextRequest, piece: Piece) -> None:
        self._counted(task, piece)
        self._loop.call_soon_threadsafe(self._put, index, piece)

    def _put(self, index: int, piece: Piece) -> None:
        before = self._pending.get(index)
        self._pending[index] = piece if before is None else before.then(piece)
        self._news.set()

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield the pieces of all tasks until the last one has ended.

        Raises:
            Refusal: one has failed.
        """
        while self._texts:
            await self._news.wait()
            index = next(iter(self._pending))
            piece = self._pending.pop(index)
            if not self._pending:
                self._news.clear()
            if piece.reason in ("error", "cancelled"):
                _log.error("a text has ended early: %s", piece.error or piece.reason)
                message = "the server could not finish this text"
                raise Refusal(400, f"{piece.error}") if piece.refused else Refusal(500, message)
            if piece.reason is not None:
                self._texts.pop(index, None)
            yield index, piece

    @contextmanager
    def cancel_on_exit(self) -> Iterator[None]:
        """Cancel the tasks on exit, however it happens, so that none runs without a reader."""
        try:
            yield
        finally:
            for text in self._texts.values():
                self._serving.cancel(text)
            self._texts.clear()


async def _body(request: Request, most: int) -> bytes:
    """Read the body of a request.

    Raises:
        Refusal: it is too large or too slow, or is not declared as JSON (a page of another site
            that acts without its reader's knowledge cannot declare it so).
    """
    declared = request.headers.get("content-type", "").partition(";")[0]
    if declared.strip().lower() != "application/json":
        raise Refusal(415, "send Content-Type: application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Refusal(400, "the client disconnected")
                body += message.get("body", b"")
                if len(body) > most:
                    large = f"a request may have at most {most} bytes"
                    raise Refusal(413, large, code="request_too_large")
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError as late:
        raise Refusal(408, f"the body took more than {BODY_SECONDS:.0f} s to arrive") from late


async def _finish_or_disconnect(
    request: Request, running: _Running, answer: Answer | ResponseAnswer, until: float
) -> None:
    """Read all pieces as long as the client is connected and has time left."""

    async def finish() -> None:
        async for index, piece in running.pieces():
            answer.add(index, piece)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        raise Refusal(400, "the client disconnected")

    both = [asyncio.create_task(finish()), asyncio.create_task(gone())]
    try:
        async with asyncio.timeout_at(until):
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError as late:
        raise _too_late() from late
    finally:
        for each in both:
            each.cancel()
    for each in done:
        each.result()


def _too_late() -> Refusal:
    return Refusal(504, "the request took longer than this server allows", code="timeout")


def _event(document: dict[str, Any]) -> str:
    kind = document.get("type")  # only events of `/v1/responses` have one
    data = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return f"data: {data}\n\n" if kind is None else f"event: {kind}\ndata: {data}\n\n"


class _Events(StreamingResponse):
    """An answer as a stream. Its tasks are cancelled if the client leaves or runs out of time."""

    def __init__(self, running: _Running, answer: Answer | ResponseAnswer, until: float) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self._running, self._answer, self._until = running, answer, until
        super().__init__(self._events(), media_type="text/event-stream", headers=headers)

    async def _events(self) -> AsyncIterator[str]:
        answer = self._answer
        try:
            for event in answer.begin():
                yield _event(event)
            async for index, piece in self._running.pieces():
                for event in answer.add(index, piece):
                    yield _event(event)
            for event in answer.end():
                yield _event(event)
            yield answer.done
        except Refusal as refusal:
            yield _event(answer.failed(refusal))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._running.cancel_on_exit():
            try:
                async with asyncio.timeout_at(self._until):
                    await super().__call__(scope, receive, send)
            except TimeoutError:  # half an answer is sent: add an event to report it, or break off
                async with asyncio.timeout(1):
                    body = _event(self._answer.failed(_too_late())).encode()
                    await send({"type": "http.response.body", "body": body, "more_body": False})
