"""What happens to requests: preemption, prefix hits, aborts and stops, one after another.

A script is run on either model runner, with views that most of its prompts outgrow.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import small_views
from support.engines import Story, counted, drive, greedy, own_engine
from support.installed import PAGE

MAX_TOKENS = 48
PREEMPTIONS = "vllm:num_preemptions"
ROOT = Path(__file__).resolve().parents[3]
BOOK = ROOT / "python" / "nwor_specpv" / "cli" / "demo" / "war_and_peace.txt"
CODE = ROOT / "python" / "nwor_specpv" / "ops" / "tree.py"
# Around a text: a question at its end about its beginning.
ASKED = "The password is 'heliotrope'.\n\n{}\n\nWhat is the password?"


def wanted(max_tokens: int = MAX_TOKENS, **more: Any) -> Any:
    return greedy(max_tokens, **({"logprobs": 5} | more))


@dataclass(frozen=True)
class Script:
    """Six prompts, of which four outgrow their views, and a cache that does not hold all requests
    at their full length. Fewer have views at once than outgrow them."""

    prompts: list[list[int]]
    options: dict[str, int]
    num_views: int = 3

    def run(self, llm: Any) -> Disturbed:
        """Every scenario; checks what must hold whatever tokens come."""
        free, found, preempted = free_blocks(llm), Disturbed(), counted(llm, PREEMPTIONS)
        calm = [drive(llm, [prompt], wanted()) for prompt in self.prompts]
        found.outputs += [(i, story.outputs["0"]) for i, story in enumerate(calm)]
        assert all(story.finished == {"0": "length"} for story in calm)
        assert all(len(story.tokens["0"]) == MAX_TOKENS for story in calm)
        assert counted(llm, PREEMPTIONS) == preempted
        self._crowd(llm, found)
        self._repeat(llm, found)
        self._abort(llm, found)
        self._stop(llm, calm, found)
        self._check_nothing_left(llm, free)
        return found

    def _crowd(self, llm: Any, found: Disturbed) -> None:
        """All at once: there is no room for all of them to the end."""
        preempted = counted(llm, PREEMPTIONS)
        story = drive(llm, self.prompts, wanted())
        found.preemptions = int(counted(llm, PREEMPTIONS) - preempted)
        assert found.preemptions > 0
        assert set(story.finished.values()) == {"length"}
        assert all(len(story.tokens[str(i)]) == MAX_TOKENS for i in range(len(self.prompts)))
        found.outputs += [(i, story.outputs[str(i)]) for i in range(len(self.prompts))]

    def _repeat(self, llm: Any, found: Disturbed) -> None:
        """Prompts whose blocks are in the prefix cache, of requests that ended and that go on."""
        first, other = (self.prompts[i] for i in (0, 2))
        drive(llm, [first, other], wanted())
        story = drive(llm, [first, other, first], wanted(), arrivals=[0, 0, 4])
        for name, prompt in zip("012", (first, other, first), strict=True):
            found.cached.append(story.cached[name])
            assert len(prompt) - 48 < story.cached[name] < len(prompt)  # with a head a block less
            assert len(story.tokens[name]) == MAX_TOKENS
        found.outputs += [(i, story.outputs[name]) for i, name in ((0, "0"), (2, "1"), (0, "2"))]

    def _abort(self, llm: Any, found: Disturbed) -> None:
        """Two amid their text, one before its first step; the others do not feel it."""
        aborts = {3: "0", 5: "2", 6: "5"}
        story = drive(llm, self.prompts, wanted(), arrivals=[0, 0, 0, 2, 4, 6], aborts=aborts)
        assert story.finished == {"1": "length", "3": "length", "4": "length"}
        assert all(len(story.tokens[name]) == MAX_TOKENS for name in story.finished)
        assert "5" not in story.tokens
        found.cut = sum(0 < len(story.tokens.get(name, [])) < MAX_TOKENS for name in ("0", "2"))
        assert found.cut == 2
        found.outputs += [(int(name), output) for name, output in story.outputs.items()]

    def _stop(self, llm: Any, calm: list[Story], found: Disturbed) -> None:
        """At a token, or at a number of tokens, amid what one step gave when all was calm."""
        params, places = [], []
        for i, story in enumerate(calm):
            place = amid_a_run(story)
            text = story.tokens["0"]
            places.append(place)
            if place is None:
                params.append(wanted())
            elif i % 3 == 2:
                params.append(wanted(place + 1))
            else:
                params.append(wanted(stop_token_ids=[text[place]]))
        story = drive(llm, self.prompts, params)
        for i, (place, chosen) in enumerate(zip(places, params, strict=True)):
            got, text = story.tokens[str(i)], calm[i].tokens["0"]
            found.outputs.append((i, story.outputs[str(i)]))
            if not chosen.stop_token_ids:
                assert story.finished[str(i)] == "length"
                assert len(got) == chosen.max_tokens
                continue
            (stop,) = chosen.stop_token_ids
            assert stop not in got[:-1], "tokens behind the stop"
            if got == text[: len(got)]:
                assert (len(got), story.finished[str(i)]) == (place + 1, "stop")
            if story.finished[str(i)] == "stop":
                assert got[-1] == stop
                found.stops += 1
            else:
                assert len(got) == MAX_TOKENS
                assert got[-1] != stop
        assert found.stops >= 1

    def _check_nothing_left(self, llm: Any, free: int) -> None:
        """After one more request, which alone may have left something: all else was given back."""
        drive(llm, self.prompts[:1], greedy(12))
        assert free_blocks(llm) == free
        assert not _scheduler(llm).requests
        engine = own_engine()
        assert not engine.interceptor.stats()["round_open"]
        if engine.trees is not None:  # which have no views
            return
        runner = engine.runner
        if hasattr(runner, "input_batch"):
            known, store = runner.drafter._requests, runner.drafter._store
        else:
            known, store = runner.speculator._rows, runner.speculator._loop.store
            assert runner.speculator._chosen_at.keys() == known.keys()
        assert len(known) == 1
        assert sorted(store._free) == sorted(set(store._free))
        assert len(store._free) == self.num_views - 1


def stories() -> Script:
    """Of the story model, with `small_views.SMALL_VIEW`."""
    options = {"num_gpu_blocks_override": 800 // PAGE, "max_model_len": 320}
    return Script(small_views.prompts(), options)


def passages(tokenizer: Any) -> Script:
    """Of a book, one of them with a question about its beginning, and one of code, with views of
    some 400 tokens."""
    text = tokenizer(BOOK.read_text()[:20_000]).input_ids
    lengths, prompts = (1000, 200, 1300, 750, 50, 1150), []
    for length in lengths:
        begin = sum(map(len, prompts))
        prompts.append(text[begin : begin + length])
    first, last = (tokenizer(part).input_ids for part in ASKED.split("{}"))
    prompts[2] = first + prompts[2][len(first) : -len(last)] + last
    prompts[3] = tokenizer(CODE.read_text()).input_ids[: lengths[3]]
    # The first five fit. Before one of them can have ended each needs another block: too many.
    blocks = sum(-(-length // PAGE) for length in lengths[:5]) + max(2, 64 // PAGE)
    options = {"num_gpu_blocks_override": blocks, "max_model_len": 2048}
    return Script(prompts, options | {"max_num_batched_tokens": 8192})


@dataclass
class Disturbed:
    """What came of it. `outputs`: of every request that got a token, with its prompt's number."""

    outputs: list[tuple[int, Any]] = field(default_factory=list)
    preemptions: int = 0
    cached: list[int] = field(default_factory=list)  # tokens found in the prefix cache
    cut: int = 0  # requests that were aborted while they got tokens
    stops: int = 0  # requests that ended at a token of their own


def amid_a_run(story: Story) -> int | None:
    """A place in the text of request "0" that is not the last of its step, and whose token has not
    been before; None: there is none."""
    text, ends = story.tokens["0"], story.lengths["0"]
    for begin, end in itertools.pairwise(ends):
        for place in range(max(2, begin), end - 1):
            if text[place] not in text[:place]:
                return place
    return None


def free_blocks(llm: Any) -> int:
    """Blocks of vLLM's cache that no request holds."""
    return _scheduler(llm).kv_cache_manager.block_pool.get_num_free_blocks()


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler
