"""Measures one load on a running server of serving.py."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import http_client
import server_process
from http_client import Reply
from real_measure import spread
from server_process import Samples, Server
from serving_load import Load, Sizes

LOOK_S = 0.5  # between two looks at vLLM's metrics
_COUNTED = {
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "draft_rounds": "vllm:spec_decode_num_drafts_total",
    "preemptions": "vllm:num_preemptions_total",
    "cached": "vllm:prefix_cache_hits_total",
}


@dataclass(frozen=True)
class Asked:
    """A request and the second in which it comes."""

    prompt: list[int]
    sizes: Sizes
    moment: float
    temperature: float = 0.0

    @property
    def body(self) -> dict[str, Any]:
        told = {"prompt": self.prompt, "max_tokens": self.sizes.answer}
        return told | {"temperature": self.temperature, "ignore_eos": True}


class Gauges:
    """Cache use and requests while a load runs, from vLLM's own metrics."""

    def __init__(self, server: Server) -> None:
        self._url = f"{server.url}/metrics"
        self.use: list[float] = []
        self.running: list[float] = []
        self.waiting: list[float] = []

    async def watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        found = await asyncio.to_thread(server_process.scrape, self._url)
        self.use.append(found.total("vllm:kv_cache_usage_perc"))
        self.running.append(found.total("vllm:num_requests_running"))
        self.waiting.append(found.total("vllm:num_requests_waiting"))

    def summary(self) -> dict[str, Any]:
        named = {"cache_use": self.use, "running": self.running, "waiting": self.waiting}
        return {
            name: {"mean": statistics.fmean(values), "most": max(values)} if values else {}
            for name, values in named.items()
        }


def run(server: Server, load: Load, asked: Sequence[Asked]) -> dict[str, Any]:
    """Everything that is recorded. Raises RuntimeError if a request failed."""
    url = f"{server.url}/metrics"
    before, began = server_process.scrape(url), time.perf_counter()
    replies, gauges = asyncio.run(_run(server, load, asked))
    seconds = max(reply.times[-1] for reply in replies if reply.times) - began
    told = figures(asked, replies, began, seconds)
    told |= gauges.summary() | counted(before, server_process.scrape(url))
    return told | {"wall_s": time.perf_counter() - began}


async def _run(server: Server, load: Load, asked: Sequence[Asked]) -> tuple[list[Reply], Gauges]:
    gauges = Gauges(server)
    async with http_client.session() as client:
        watching = asyncio.create_task(gauges.watch())
        try:
            send = _closed if load.clients else _open
            replies = await send(client, server, load, asked)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        if not gauges.use:  # a few short requests may end before the first look
            await gauges.look()
    failed = [reply.error for reply in replies if reply.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first with {failed[0]}")
    return replies, gauges


async def _open(client: Any, server: Server, load: Load, asked: Sequence[Asked]) -> list[Reply]:
    """Requests come at their moments, whatever became of the others."""
    began = time.perf_counter()

    async def one(request: Asked) -> Reply:
        await asyncio.sleep(max(0.0, began + request.moment - time.perf_counter()))
        return await http_client.ask(client, server.url, request.body)

    return list(await asyncio.gather(*map(one, asked)))


async def _closed(client: Any, server: Server, load: Load, asked: Sequence[Asked]) -> list[Reply]:
    """Each client asks when it has its answer."""
    replies: dict[int, Reply] = {}
    waiting = iter(enumerate(asked))

    async def one() -> None:
        for index, request in waiting:
            replies[index] = await http_client.ask(client, server.url, request.body)

    await asyncio.gather(*(one() for _ in range(load.clients)))
    return [replies[index] for index in range(len(asked))]


def figures(
    asked: Sequence[Asked], replies: Sequence[Reply], began: float, seconds: float
) -> dict[str, Any]:
    """Throughput and times. A gap between two outputs is shared by the tokens of the second."""
    gaps, shares, arrivals = [], [], []
    for request, reply in zip(asked, replies, strict=True):
        if reply.tokens != request.sizes.answer:
            raise RuntimeError(f"got {reply.tokens} tokens, not {request.sizes.answer}")
        arrivals += zip(reply.times, reply.sizes, strict=True)
        before = reply.times[0]
        for now, size in list(zip(reply.times, reply.sizes, strict=True))[1:]:
            gaps.append(1e3 * (now - before))
            shares += [gaps[-1] / size] * size
            before = now
    return {
        "requests": len(replies),
        "prompt_tokens": sum(request.sizes.prompt for request in asked),
        "tokens": sum(reply.tokens for reply in replies),
        "seconds": seconds,
        "requests_per_s": len(replies) / seconds,
        "tokens_per_s": sum(reply.tokens for reply in replies) / seconds,
        "middle_tokens_per_s": middle_rate(arrivals),
        "first_ms": spread([1e3 * (reply.times[0] - reply.began) for reply in replies]),
        "output_gap_ms": spread(gaps),
        "token_ms": spread(shares),
        "whole_s": spread([reply.times[-1] - reply.began for reply in replies]),
    }


def middle_rate(arrivals: Sequence[tuple[float, int]]) -> float:
    """Tokens a second from when a tenth of them had come until nine tenths had: without the time in
    which the first prompts are computed, and without the last requests."""
    total, come, at = sum(size for _, size in arrivals), 0, {}
    for moment, size in sorted(arrivals):
        come += size
        for tenth in (1, 9):
            if tenth not in at and come >= tenth * total / 10:
                at[tenth] = (moment, come)
    (begin, first), (end, last) = at[1], at[9]
    return (last - first) / (end - begin) if end > begin else 0.0


def counted(before: Samples, after: Samples) -> dict[str, float]:
    """What vLLM has counted meanwhile."""
    return {key: after.total(name) - before.total(name) for key, name in _COUNTED.items()}
