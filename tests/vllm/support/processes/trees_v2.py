"""Draft trees on model runner V2 in a process of its own: trees_v2.py JOBS RESULTS.

jobs: a list of runs, each with `start` (arguments of engines.start; `speculation` is added to a
head of made-up weights, None: no speculation), `prompts`, `params` (of SamplingParams, one for each
prompt; `bad_words` are lists of tokens), `arrivals`, `aborts`, `repeats`, and
    head      `eagle`, instead of `eagle3`
    arms      [drafts, 0] that steps take in turns, instead of what pays
    oracle    number of an earlier run: trees are random and hold what that run has written on one
              of their paths, now and then with an error; `seed` says how
    bypass    no round fits in staging
    graphs    [rows, requests] for which growing trees is recorded, see `recorded_graph.py`
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import conftest  # noqa: F401  (vLLM's environment)
from nwor_specpv import Metrics
from support import triton_cpu
from support.engines import counted, drive, greedy, own_engine, start
from support.heads import story_head
from support.processes.runner_v2 import take_turns, watch_lengths
from support.recorded_graph import RecordedGraph, record

PREEMPTIONS = "vllm:num_preemptions"


def main() -> None:
    triton_cpu.prepare()
    sample_in_torch()
    allow_all_parameters()
    jobs = json.loads(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as folder:
        heads = {}
        for method in ("eagle3", "eagle"):
            heads[method] = story_head(Path(folder), torch.float32, method)
            del heads[method]["num_speculative_tokens"]
        results: list[dict[str, Any]] = []
        for job in jobs:
            results.append(run(job, heads[job.get("head", "eagle3")], results))
        Path(sys.argv[2]).write_text(json.dumps(results))


def sample_in_torch() -> None:
    """vLLM's kernel for top-k and top-p does not run in Triton's interpreter; its torch code
    does."""
    from vllm.v1.sample.ops import topk_topp_sampler as ops
    from vllm.v1.worker.gpu.sample import sampler, states

    def apply_top_k_top_p(logits: Any, k: Any, p: Any) -> Any:
        return ops.apply_top_k_top_p_pytorch(logits, k, p)

    for module in (ops, sampler, states):
        module.apply_top_k_top_p = apply_top_k_top_p


def allow_all_parameters() -> None:
    """vLLM's front end refuses min-p and logit bias beside speculation; its sampler does not."""
    from vllm import SamplingParams

    SamplingParams._validate_spec_decode = lambda *_: None


def run(job: dict[str, Any], head: dict[str, Any], before: list[dict[str, Any]]) -> dict[str, Any]:
    options = job["start"]
    if options["speculation"] is not None:
        options["speculation"] = head | options["speculation"]
    llm = start(options.pop("nwor"), **options)
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    runner = executor.driver_worker.worker.model_runner
    walks: list[list[list[int]]] = []
    lengths: list[tuple[int, int]] = []
    before_it = Metrics().snapshot()
    if options["speculation"] is not None:
        if job.get("bypass"):
            staging = own_engine().staging
            staging._settings = dataclasses.replace(staging._settings, max_staging_bytes=1)
        if "oracle" in job:
            written = before[job["oracle"]]["tokens"][0]
            texts = [prompt + written[str(i)] for i, prompt in enumerate(job["prompts"])]
            draft_from(runner, job["prompts"], texts, job.get("seed", 0))
        if job.get("graphs"):
            record_growth(runner.speculator, job["graphs"])
        if job.get("arms"):
            take_turns(llm, job["arms"])
        walks, lengths = watch_walks(), watch_lengths(llm)
    params = [params_of(one) for one in job["params"]]
    aborts = {int(step): name for step, name in job.get("aborts", {}).items()}
    preempted = counted(llm, PREEMPTIONS)
    stories = [
        drive(llm, job["prompts"], params, arrivals=job.get("arrivals"), aborts=aborts)
        for _ in range(job.get("repeats", 1))
    ]
    found = {
        "tokens": [story.tokens for story in stories],
        "steps": [story.steps for story in stories],
        "cached": [story.cached for story in stories],
        "finished": [story.finished for story in stories],
        "log_probs": [log_probs_of(story) for story in stories],
        "preemptions": counted(llm, PREEMPTIONS) - preempted,
        "async": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
        "walks": walks,
    }
    if options["speculation"] is not None:
        engine = own_engine()
        found |= {
            "speculator": type(runner.speculator).__name__,
            "sampler": type(runner.rejection_sampler).__name__,
            "violations": engine.violations,
            "stats": engine.interceptor.stats(),
            "scheduler": type(llm.llm_engine.engine_core.engine_core.scheduler).__name__,
            "lengths": lengths,
            "grown": grown(before_it),
            "replays": sum(graph.replays for graph in runner.speculator._graphs.values()),
        }
    return found


def grown(before: dict[str, Any]) -> dict[str, float]:
    now = Metrics().snapshot()
    found = {name: now[name] - before[name] for name in now if isinstance(now[name], int | float)}
    return {name: value for name, value in found.items() if value}


def record_growth(speculator: Any, shapes: list[list[int]]) -> None:
    """What the speculator does when vLLM has captured its own graphs."""
    from nwor_specpv.vllm.tree import speculator as module

    for layer in speculator._engine.layers.values():
        layer.use_direct_call = True  # not through an op that is written in Python
    torch.cuda.CUDAGraph, torch.cuda.graph = RecordedGraph, record
    module.graph_capture = lambda device: contextlib.nullcontext()
    with torch.inference_mode():
        speculator._capture_growth([tuple(shape) for shape in shapes])


def params_of(given: dict[str, Any]) -> Any:
    """There is no tokenizer here that would make tokens of bad words. JSON's keys are strings."""
    words = given.pop("bad_words", None)
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    params = greedy(**given)
    if words:
        params._bad_words_token_ids = words
    return params


def log_probs_of(story: Any) -> dict[str, list[dict[str, float]]]:
    """Of each request and each of its tokens: log-probabilities by token."""
    return {
        name: [
            {str(token): one.logprob for token, one in place.items()} for place in output.logprobs
        ]
        for name, output in story.outputs.items()
        if output.logprobs
    }


def draft_from(runner: Any, prompts: list[Any], texts: list[Any], seed: int) -> None:
    """Random trees in the place of the head's. Each holds the tokens to come on one path."""
    from nwor_specpv import tree_from_parents

    trees, rng = own_engine().trees, random.Random(seed)
    known = {tuple(prompt): text for prompt, text in zip(prompts, texts, strict=True)}
    states, put = runner.req_states, trees.put

    def putting(requests: torch.Tensor, _: Any) -> torch.Tensor:
        places = runner.speculator.input_buffers.positions[: requests.shape[0]].tolist()
        made = []
        for index, place in zip(requests.tolist(), places, strict=True):
            length = int(states.prompt_len.np[index])
            text = known[tuple(states.all_token_ids.gpu[index, :length].tolist())]
            made.append(random_tree(trees.shape, text[place + 2 :], rng))
        parents, tokens = (torch.tensor(part) for part in zip(*made, strict=True))
        nothing = torch.zeros(len(made), dtype=torch.int32)
        tree = tree_from_parents(parents.int(), nothing, tokens)
        chain = torch.tensor([hold(text_of(t, p), trees.shape.depth) for p, t in made])
        return put(requests, trees.drafted(tree, chain, trees.chains[requests.long()]))

    def text_of(tokens: list[int], parents: list[int]) -> list[int]:
        """The tokens of the last row's path."""
        row, found = len(parents) - 1, []
        while row:
            found.insert(0, tokens[row])
            row = parents[row]
        return found

    trees.put = putting


def random_tree(shape: Any, text: list[int], rng: random.Random) -> tuple[list[int], list[int]]:
    """Parents and tokens of a tree whose last row's path holds the text, with an error in one of
    two."""
    while True:
        parents, depths = [-1], [0]
        for row in range(1, shape.rows):
            above = rng.choice([row - 1, rng.randrange(row), rng.randrange(row)])
            if depths[above] == shape.depth:
                above = 0
            parents.append(above)
            depths.append(depths[above] + 1)
        if depths[-1] > 1:
            break
    tokens = [rng.randrange(300) for _ in parents]
    row = shape.rows - 1
    while row:
        if depths[row] <= len(text):
            tokens[row] = text[depths[row] - 1]
        row = parents[row]
    if rng.random() < 0.3:
        tokens[rng.randrange(1, shape.rows)] = rng.randrange(300)
    return parents, tokens


def hold(tokens: list[int], size: int) -> list[int]:
    return (tokens + [0] * size)[:size]


def watch_walks() -> list[list[list[int]]]:
    """For each step with drafts: the accepted rows of its requests."""
    from nwor_specpv.vllm.tree.store import StepTrees

    accept, found = StepTrees.accept, []

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = accept(self, *args, **kwargs)
        found.append([[row for row in path if row >= 0] for path in self.path.tolist()])
        return result

    StepTrees.accept = watched
    return found


if __name__ == "__main__":
    main()
