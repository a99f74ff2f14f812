"""Views so small that short prompts outgrow them, and prompts on both sides of them."""

from __future__ import annotations

from engines import story_prompts

# A view of 96 tokens: one block of sink, three that are chosen, two of window.
SMALL_VIEW = {
    "enable_specpv": True,
    "specpv_n_sink_blocks": 1,
    "specpv_n_retrieval_blocks": 3,
    "specpv_n_window_blocks": 2,
    "strict": True,
}
LENGTHS = (200, 40, 260, 150, 10, 230)  # two are shorter than the view


def prompts() -> list[list[int]]:
    return [(p * 40)[:n] for p, n in zip(story_prompts(6), LENGTHS, strict=True)]
