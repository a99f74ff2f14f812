"""Texts of a book on both sides of a view, for SmolLM2 in mode `refresh`."""

from __future__ import annotations

from typing import Any

from support.disturbances import ASKED, BOOK
from support.engines import greedy
from support.gpu_engines import REFRESH, TURN

# Covers the shorter texts, and less than half of the longer ones.
BOOK_VIEW = REFRESH | {
    "specpv_n_sink_blocks": 2,
    "specpv_n_retrieval_blocks": 150,
    "specpv_n_window_blocks": 6,
    "specpv_full_refresh_interval": 4,
}
BOOK_OPTIONS = {
    "max_model_len": 8192,
    "max_num_batched_tokens": 8192,
    "kv_cache_memory_bytes": 1 << 30,
    "enable_prefix_caching": False,
}
LENGTHS = (64, 64, 64)
LONGER_LENGTHS = (96, 96, 32)
COVERED, LONGER = (9000, 6000), (27000, 24000)  # characters


def texts(first: int, second: int) -> list[str]:
    """A book that goes on, a question about its beginning, a short question."""
    book = BOOK.read_text()
    told = (
        f"{book[:first]}\n\nContinue.",
        ASKED.format(book[9000 : 9000 + second]),
        "Name ten animals.",
    )
    return [TURN.format(text) for text in told]


def read(llm: Any, asked: list[str], lengths: tuple[int, ...]) -> list[Any]:
    params = [greedy(count, logprobs=1) for count in lengths]
    outputs = [output.outputs[0] for output in llm.generate(asked, params, use_tqdm=False)]
    assert [len(output.token_ids) for output in outputs] == list(lengths)
    return outputs
