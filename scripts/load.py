"""Send requests of several clients at once to a server of OpenAI's API, and time its streams.

    layerskip serve smollm2 --dtype bfloat16 --threads 2 &
    python scripts/load.py http://127.0.0.1:8000/v1 --clients 1 2 4 8 16 --output load.json

A client sends its next chat as soon as it has read an answer. Every chat has its own seed and
number, so that no server can answer from a cache of earlier ones. Tokens are counted by the
server's `usage`, otherwise by the pieces of the stream, which may be fewer. Seconds are measured by
the client: up to the first piece of text, and from there to the last one per token in between.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from layerskip.cli.inputs import as_chats, read_given
from layerskip.files.writing import write_text


@dataclass(frozen=True)
class Answer:
    sent: float
    first: float
    last: float
    pieces: int
    usage: int | None

    @property
    def tokens(self) -> int:
        return self.pieces if self.usage is None else self.usage


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """Send a chat and read its stream; a refusal or an interrupted stream is an error."""
    times: list[float] = []
    usage = None
    ended = False
    sent = time.perf_counter()
    async with client.stream("POST", "chat/completions", json=body) as response:
        if response.status_code != 200:
            said = (await response.aread()).decode(errors="replace")
            raise ValueError(f"the server answers {response.status_code}: {said[:300]}")
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                break
            event = json.loads(data)
            if "error" in event:
                raise ValueError(f"the server breaks off: {event['error']}")
            usage = (event.get("usage") or {}).get("completion_tokens", usage)
            for choice in event["choices"]:
                ended = ended or choice.get("finish_reason") is not None
                if (choice.get("delta") or {}).get("content"):
                    times.append(time.perf_counter())
    if not ended:
        raise ValueError("a stream has no end")
    if not times:
        raise ValueError("a stream has no text")
    return Answer(sent, times[0], times[-1], len(times), usage)


async def load(
    client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]], clients: int
) -> dict[str, Any]:
    """Send all requests, with `clients` of them at a time; returns their `level_of`."""
    waiting, answers = iter(bodies), list[Answer]()

    async def one() -> None:
        for body in waiting:
            answers.append(await ask(client, body))

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(one())
    return level_of(answers, clients, time.perf_counter() - start)


def level_of(answers: Sequence[Answer], clients: int, seconds: float) -> dict[str, Any]:
    """Results of a number of clients together; seconds, medians and 90th percentiles."""
    first = [each.first - each.sent for each in answers]
    between = [(each.last - each.first) / (each.tokens - 1) for each in answers if each.tokens > 1]
    tokens = sum(each.tokens for each in answers)
    counted = sum(each.usage is not None for each in answers)
    return {
        "clients": clients,
        "requests": len(answers),
        "tokens": tokens,
        "counted": {0: "pieces", len(answers): "usage"}.get(counted, "usage, pieces"),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        **typical("first", first),
        **typical("between", between or [0.0]),
    }


def typical(name: str, values: Sequence[float]) -> dict[str, float]:
    high = np.quantile(values, 0.9, method="inverted_cdf")  # one of the values
    return {name: float(np.median(values)), f"{name}_p90": float(high)}


def bodies_of(args: argparse.Namespace, count: int, begin: int) -> list[dict[str, Any]]:
    chats = as_chats(read_given(args.prompts), chat=True)
    common = {"model": args.model, "max_tokens": args.max_tokens, "stream": True}
    common |= {"temperature": args.temperature}
    if args.usage:
        common["stream_options"] = {"include_usage": True}
    bodies = []
    for place in range(count):
        *before, asked = chats[place % len(chats)].messages or ()
        numbered = {**asked, "content": f"({begin + place}) {asked['content']}"}
        bodies.append({**common, "messages": [*before, numbered], "seed": begin + place})
    return bodies


async def run_levels(
    args: argparse.Namespace, client: httpx.AsyncClient
) -> AsyncIterator[dict[str, Any]]:
    """Run each number of clients in turn, after a warm-up."""
    if args.model is None:
        listed = (await client.get("models")).raise_for_status().json()["data"]
        args.model = listed[0]["id"]
    begin = args.seed
    for number, clients in enumerate([args.warmup, *args.clients]):
        count = max(args.requests, 2 * clients) if number else clients
        if count:
            level = await load(client, bodies_of(args, count, begin), clients)
            if number:
                yield level
        begin += count


HEAD = "clients requests  tokens  tokens/s  first, s     p90   between, s     p90  counted by"


ROW = (
    "{clients:7} {requests:8} {tokens:7} {tokens_per_second:9.1f} {first:9.3f} {first_p90:7.3f} "
    "{between:12.4f} {between_p90:7.4f}  {counted}"
)


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="load", description=__doc__.split("\n")[0])
    parser.add_argument("url", help="with its /v1")
    parser.add_argument("--model", help="[default: the first that it lists]")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N")
    parser.add_argument(
        "--requests", type=int, default=16, help="in all, and two a client at least"
    )
    parser.add_argument("--warmup", type=int, default=2, help="clients of a warm-up round")
    parser.add_argument("--prompts", type=Path, default=Path("spec-bench"), help="as for layerskip")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of silence")
    parser.add_argument(
        "--no-usage", dest="usage", action="store_false", help="for servers that refuse to be asked"
    )
    parser.add_argument("--output", type=Path, help="a JSON file")
    args = parser.parse_args(words)
    if min(*args.clients, args.max_tokens, args.requests) < 1:
        parser.error("--clients, --max-tokens and --requests must be at least 1")
    return args


async def run(args: argparse.Namespace) -> None:
    headers = {"Authorization": f"Bearer {args.api_key}"}
    most = httpx.Limits(max_connections=None, max_keepalive_connections=max(args.clients))
    where: dict[str, Any] = {"base_url": args.url, "headers": headers, "limits": most}
    settings = {name: value for name, value in vars(args).items() if name != "api_key"}
    levels = []
    async with httpx.AsyncClient(**where, timeout=args.timeout) as client:
        print(HEAD, flush=True)
        async for level in run_levels(args, client):
            print(ROW.format(**level), flush=True)
            levels.append(level)
            if args.output:
                document = {"settings": settings, "levels": levels}
                write_text(args.output, json.dumps(document, indent=1, default=str) + "\n")


def main(words: Sequence[str] | None = None) -> None:
    args = parsed(words)
    try:
        asyncio.run(run(args))
    except* (ValueError, httpx.HTTPError) as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        print(f"load: error: {error or type(error).__name__}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
