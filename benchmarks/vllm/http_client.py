"""A client of vLLM's completions that reads its answers as they come, and notes when."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from server_process import MODEL

PATIENCE_S = 600.0  # without a piece of an answer


@dataclass
class Reply:
    """What came of one request. Times are of `time.perf_counter`."""

    began: float
    times: list[float] = field(default_factory=list)  # of each piece that has tokens
    sizes: list[int] = field(default_factory=list)  # tokens of each piece
    text: str = ""
    finish: str = ""  # vLLM's reason; empty if the client left
    error: str = ""

    @property
    def tokens(self) -> int:
        return sum(self.sizes)


def session() -> aiohttp.ClientSession:
    """For any number of requests at once."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=60, sock_read=PATIENCE_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def ask(
    client: aiohttp.ClientSession, url: str, body: Mapping[str, Any], leave_after: int = 0
) -> Reply:
    """Sends a request and reads its answer; closes the connection after `leave_after` pieces."""
    wanted = {"model": MODEL, **body, "stream": True}
    wanted["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    reply = Reply(time.perf_counter())
    try:
        async with client.post(f"{url}/v1/completions", json=wanted) as response:
            if response.status != 200:
                reply.error = f"status {response.status}: {(await response.text())[:500]}"
                return reply
            async for line in response.content:
                if line.startswith(b"data: {"):
                    _note(reply, json.loads(line[6:]))
                if reply.error or (leave_after and len(reply.times) >= leave_after):
                    response.close()
                    break
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
        reply.error = f"{type(error).__name__}: {error}"
    return reply


def _note(reply: Reply, piece: dict[str, Any]) -> None:
    now = time.perf_counter()
    if "error" in piece:
        reply.error = str(piece["error"])
        return
    known = reply.tokens
    size = (piece.get("usage") or {}).get("completion_tokens", known) - known
    if size > 0:
        reply.times.append(now)
        reply.sizes.append(size)
    for choice in piece.get("choices", ()):
        reply.text += choice.get("text") or ""
        reply.finish = choice.get("finish_reason") or reply.finish
