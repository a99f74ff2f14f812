"""Engines on model runner V2 in a process of their own: runner_v2.py JOB.json RESULT.json.

job: a list of runs, each with `start` (arguments of engines.start; where its `speculation` names no
method it is a head of made-up weights), `prompts`, `params` (of SamplingParams), `arrivals`,
`aborts`, `repeats` (how often the prompts are run), and
    graphs    batch sizes for which drafting is recorded, see `recorded_graph.py`
    truth     texts, one for each prompt: the head guesses from them, now and then wrongly
    fault     passes of the target fail from the so many-th on
    arms      [drafts, passes] that steps take in turns, instead of what pays
    confirmed texts as well: summaries and prefix hashes are watched, see `confirmed.py`
    synchronous  in the first: all runs are without asynchronous scheduling
A job {"kernels": N} compares vLLM's sampling kernels with `reference_sampling.py` on N rows.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import conftest  # noqa: F401  (vLLM's environment)
from nwor_specpv import Metrics
from support import reference_sampling, triton_cpu
from support.confirmed_tokens_watch import ConfirmedTokensWatch
from support.engines import caches, counted, draft_failures, drive, greedy, own_engine, start
from support.engines import stats as own_stats
from support.heads import story_head
from support.recorded_graph import RecordedGraph, record

PREEMPTIONS = "vllm:num_preemptions"


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    triton_cpu.prepare(asynchronous=not jobs[0].get("synchronous"))
    with tempfile.TemporaryDirectory() as folder:
        head = story_head(Path(folder), torch.float32)
        results = [
            compare_kernels(job["kernels"]) if "kernels" in job else run(job, head) for job in jobs
        ]
    Path(sys.argv[2]).write_text(json.dumps(results))


def run(job: dict[str, Any], head: dict[str, Any]) -> dict[str, Any]:
    options = job["start"]
    if "method" not in options["speculation"]:
        options["speculation"] = head | options["speculation"]
    begun = Metrics().snapshot()
    llm = start(options.pop("nwor"), **options)
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    runner = executor.driver_worker.worker.model_runner
    speculator, found = runner.speculator, {}
    loop = speculator._loop
    found["start"] = {"tail": loop and loop.tail.bytes, "failures": draft_failures(begun)}
    if job.get("arms"):
        take_turns(llm, job["arms"])
    if job.get("truth"):
        guess_from(runner, job["prompts"], job["truth"])
    if job.get("graphs"):
        capture(speculator, job["graphs"])
    if job.get("fault"):
        fail_from(speculator, job["fault"])
    if job.get("confirmed"):
        watched = ConfirmedTokensWatch(llm, runner, job["prompts"], job["confirmed"])
    written, drawn, grew = watch_proposals(speculator)
    hits, lengths, alone = watch_prefix_hits(llm), watch_lengths(llm), watch_sampling(runner)
    before, preempted = Metrics().snapshot(), counted(llm, PREEMPTIONS)
    params = greedy(**job["params"])
    aborts = {int(step): name for step, name in job.get("aborts", {}).items()}
    stories = [
        drive(llm, job["prompts"], params, arrivals=job.get("arrivals"), aborts=aborts)
        for _ in range(job.get("repeats", 1))
    ]
    now = Metrics().snapshot()
    grown = {name: now[name] - before[name] for name in now if isinstance(now[name], int | float)}
    if job.get("confirmed"):
        found["confirmed"] = watched.report()
    replays = [graph.replays for graph in speculator._graphs.values()]
    return found | {
        "tokens": [story.tokens for story in stories],
        "steps": [story.steps for story in stories],
        "runner": type(runner).__module__,
        "speculator": type(speculator).__name__,
        "async": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
        "violations": own_engine().violations,
        "fallbacks": own_stats()["fallbacks"],
        "grown": {name: value for name, value in grown.items() if value},
        "failures": draft_failures(before),
        "latest_failure": own_engine().draft_failures.latest,
        "preemptions": counted(llm, PREEMPTIONS) - preempted,
        "prefix_hits": sum(hits),
        "lengths": lengths,
        "without_speculator": sum(alone),
        "foreseen": foreseen(llm),
        "replays": sum(replays),
        "proposals": len(written),
        "cache_written_by_proposals": sum(written),
        "drawn": [len(drawn), sum(drawn)],
        "tokens_per_pass": sum(grew) / max(1, len(grew)),
        "rows_left": len(speculator._loop.store._free) if speculator._loop else None,
    }


def take_turns(llm: Any, arms: list[list[int]]) -> None:
    """Has the scheduler choose another arm in every step; short requests get no passes."""
    from nwor_specpv.arms import Arm

    decisions = llm.llm_engine.engine_core.engine_core.scheduler.decisions
    turns, choose = itertools.cycle(Arm(*arm) for arm in arms), decisions.choice.choose

    def chosen(*args: Any, passes: bool, **more: Any) -> Any:
        arm = next(turns)
        if arm.passes and not passes:
            arm = Arm(decisions.choice.arms[1].drafts, 0)
        return choose(*args, passes=passes, **more)._replace(arm=arm)

    decisions.choice.choose = chosen


def guess_from(runner: Any, prompts: list[list[int]], texts: list[list[int]]) -> None:
    """The head's guesses are the text's own tokens, three of four times.

    By operations on the device, so that they are part of what is recorded.
    """
    from nwor_specpv.vllm.specpv.draft_models import EagleHead

    spec = runner.speculator
    truth = torch.zeros(spec.max_num_reqs, spec.max_model_len + 64, dtype=torch.int64)
    propose, draft = spec.propose, EagleHead._draft
    known = {tuple(prompt): text for prompt, text in zip(prompts, texts, strict=True)}

    def proposing(batch: Any, *args: Any, **kwargs: Any) -> Any:
        for name in batch.req_ids:
            index = runner.req_states.req_id_to_index.get(name)
            if index is not None:
                length = int(runner.req_states.prompt_len.np[index])
                prompt = runner.req_states.all_token_ids.gpu[index, :length].tolist()
                text = known[tuple(prompt)]
                truth[index, : len(text)] = torch.tensor(text)
        return propose(batch, *args, **kwargs)

    def drafted(self: Any, count: int, *args: Any) -> Any:
        guesses = draft(self, count, *args)
        _, _, stretch, at, *columns = args
        if spec.draft_logits is not None and columns and columns[0] is not None:
            return guesses  # the sampler has been told their logits
        places = stretch.start[:, None] + at + 1 + torch.arange(guesses.shape[1])
        requests = spec.idx_mapping[:count].long().clamp(min=0)
        right = truth[requests[:, None], places]
        return torch.where(places * 7919 % 4 != 0, right, guesses)

    spec.propose, EagleHead._draft = proposing, drafted


def capture(speculator: Any, sizes: list[int]) -> None:
    """What the speculator does when vLLM has captured its own graphs."""
    from nwor_specpv.vllm.specpv import proposals as module

    for layer in speculator._engine.layers.values():
        layer.use_direct_call = True  # not through an op that is written in Python
    torch.cuda.CUDAGraph, torch.cuda.graph = RecordedGraph, record
    module.graph_capture = lambda device: contextlib.nullcontext()
    if hasattr(speculator, "hidden_states"):
        # Of warm-up steps, whose attention gives zeros on a GPU and what was in memory on the CPU.
        speculator.hidden_states.zero_()
    with torch.inference_mode():
        speculator._capture_loop(sizes)


def fail_from(speculator: Any, number: int) -> None:
    target, calls = speculator._target, []
    forward = target.forward

    def failing(*args: Any) -> Any:
        calls.append(None)
        if len(calls) >= number:
            raise RuntimeError("injected")
        return forward(*args)

    target.forward = failing


def watch_proposals(speculator: Any) -> tuple[list[bool], list[bool], list[float]]:
    """For each proposal: whether a byte of the target's caches was other after it. For each draft,
    at temperatures above 0: whether it is what its logits and the noise of its place give. For
    each chain: how many tokens a pass added."""
    draft, written, drawn, grew = speculator._draft_by_passes, [], [], []

    def watched(batch: Any, passes: int, *args: Any) -> None:
        held = caches()
        try:
            draft(batch, passes, *args)
            chains = speculator._loop.chains
            grew.extend((chains.lens[chains.active] / passes).tolist())
            if speculator.draws:
                drawn.extend(check_draws(speculator, batch))
        finally:
            now = caches()
            written.append(any(not torch.equal(held[name], now[name]) for name in held))

    speculator._draft_by_passes = watched
    return written, drawn, grew


def watch_prefix_hits(llm: Any) -> list[int]:
    """Tokens that each request found in the prefix cache. vLLM's own counter stays behind here."""
    manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    find, found = manager.get_computed_blocks, []

    def watched(request: Any) -> Any:
        result = find(request)
        found.append(result[1])
        return result

    manager.get_computed_blocks = watched
    return found


def watch_lengths(llm: Any) -> list[tuple[int, int]]:
    """For each request of each step but its first: drafts that the scheduler had wanted for it, and
    drafts that it verifies."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule, wanted, found = scheduler.schedule, {}, []

    def watched(*args: Any) -> Any:
        output = schedule(*args)
        for name in output.num_scheduled_tokens:
            verified = len(output.scheduled_spec_decode_tokens.get(name, ()))
            if name in wanted:
                found.append((wanted[name], verified))
            wanted[name] = output.num_spec_tokens_to_schedule
        return output

    scheduler.schedule = watched
    return found


def foreseen(llm: Any) -> tuple[float, float] | None:
    """What the scheduler says of 3 guesses at the end."""
    decisions = llm.llm_engine.engine_core.engine_core.scheduler.decisions
    scouts = getattr(decisions, "scouts", None)
    return scouts.tokens(3) if scouts is not None else None


def watch_sampling(runner: Any) -> list[bool]:
    """For each step: whether vLLM's runner has no speculator for it."""
    sample, found = runner.sample, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        found.append(runner.speculator is None)
        return sample(*args, **kwargs)

    runner.sample = watched
    return found


def check_draws(speculator: Any, batch: Any) -> list[bool]:
    chains, found = speculator._loop.chains, []
    for b, request in enumerate(batch.idx_mapping.tolist()):
        # The head's guesses were drawn, and what a lookup guesses is certain.
        behind = chains.rows - 1 if speculator.draws_guesses else speculator.limit
        behind = behind if chains.active[b] else 0
        count = min(int(chains.lens[b]) + behind, speculator.limit)
        places = chains.prefix[b] + torch.arange(count)
        seeds = speculator.draft_seeds[request].expand(count).contiguous()
        logits = speculator.draft_logits[request, :count]
        if reference_sampling.HASHED:
            logits = logits / speculator.temperature[request]
        noise = reference_sampling.noise(seeds, places, logits.shape[1], drafting=True)
        best = (logits.double() + noise).argmax(1)
        found += (best == speculator.draft_tokens[b, :count]).tolist()
    return found


def compare_kernels(rows: int) -> dict[str, Any]:
    """Shares of rows on which vLLM's kernels and the reference agree."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    torch.manual_seed(0)
    words, drafts, requests = 9, 4, 10
    logits = torch.randn(rows, words)
    owners = torch.randint(-1, requests, (rows,), dtype=torch.int32)
    heat = torch.rand(requests) * (torch.arange(requests) != 3)
    seeds = torch.randint(-(2**62), 2**62, (requests,))
    places, columns = torch.randint(0, 100_000, (rows,)), torch.arange(rows) % drafts
    told = [torch.zeros(requests, drafts, words) for _ in range(2)]
    said = [
        sample(
            logits, owners, heat, seeds, places, True, **reference_sampling.keeping(kept, columns)
        )
        for sample, kept in ((gumbel_sample, told[0]), (reference_sampling.gumbel_sample, told[1]))
    ]
    drawn = (said[0] == said[1]).double().mean().item()
    target = torch.randn(rows, drafts + 1, words)
    offered = target[:, :drafts] + 0.5 * torch.randn(rows, drafts, words)
    tokens = torch.randint(0, words, (rows, drafts + 1))
    seeds, own = torch.randint(0, 2**62, (rows,)), torch.arange(rows, dtype=torch.int32)
    places = torch.arange(drafts + 1) + torch.randint(0, 99, (rows, 1))
    sampled, counts = rejection_sample(
        target.flatten(0, 1),
        offered,
        tokens.flatten(),
        torch.arange(rows + 1, dtype=torch.int32) * (drafts + 1),
        places.flatten(),
        own,
        own.repeat_interleave(drafts + 1),
        torch.arange(drafts + 1, dtype=torch.int32).repeat(rows),
        torch.ones(rows),
        seeds,
        drafts,
        None,
    )
    wanted, lens = reference_sampling.verify(target, offered, tokens[:, 1:], seeds, places)
    same = [
        int(counts[i]) == int(lens[i]) and sampled[i, : lens[i]].equal(wanted[i, : lens[i]])
        for i in range(rows)
    ]
    return {
        "drawn": drawn,
        "logits": torch.equal(*told),
        "verified": sum(same) / rows,
        "lengths": sorted(set(lens.tolist())),
    }


if __name__ == "__main__":
    main()
