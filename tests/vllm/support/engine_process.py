"""Runs one engine in a process of its own: python engine_process.py JOB.json RESULT.json.

For what cannot share a process with the tests: vLLM without our plugin, tensor parallelism, whose
ranks are processes, and vLLM that measures how much memory is free.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1]


def run_job(
    folder: Path, job: dict[str, Any], path: Path | None = None, **env: str
) -> dict[str, Any]:
    """Runs a job (see `main`) and returns its result, with the process' output as `log`.

    `path` stands before everything else on the Python path.
    """
    result, log = run_script(folder, job, Path(__file__), path, **env)
    return result | {"log": log}


def run_script(
    folder: Path, job: Any, script: Path, path: Path | None = None, **env: str
) -> tuple[Any, str]:
    """Runs `script JOB.json RESULT.json`: its result and what it printed."""
    folders = [str(part) for part in (path, FOLDER, os.environ.get("PYTHONPATH")) if part]
    source, result = folder / "job.json", folder / "result.json"
    source.write_text(json.dumps(job))
    result.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, str(script), str(source), str(result)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)} | env,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    log = done.stdout + done.stderr
    own = "\n".join(line for line in log.splitlines() if "nwor_specpv: " in line)
    assert done.returncode == 0, own + done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(result.read_text()), log


def rank_report(_: object) -> dict[str, Any]:
    """What one rank counted; runs in the rank's own process."""
    if "nwor_specpv.vllm.engine" not in sys.modules:
        return {"stats": None, "violations": []}
    from nwor_specpv import Metrics
    from nwor_specpv.vllm.registry import current_engine

    engine = current_engine()
    if engine is None or engine.interceptor is None:
        return {"stats": None, "violations": []}
    found = {"stats": engine.interceptor.stats(), "violations": engine.violations}
    found |= {"counted": Metrics().snapshot(), "latest_failure": engine.draft_failures.latest}
    found["proposed"] = getattr(getattr(engine.runner, "drafter", None), "proposed", [])
    views = getattr(getattr(engine.runner, "speculator", None), "_loop", None)
    if engine.refresh is not None:
        views = engine.refresh.views
    if views is not None:
        seen = views.store.key_caches
        caches = [engine.layers[name].kv_cache for name in engine.own_layers]
        found["views_are_of_the_caches"] = [c.data_ptr() for c in seen] == [
            c.data_ptr() for c in caches
        ]
    return found


def break_commits(_: object, fault: str, calls: list[int]) -> None:
    """These commits of accepted drafts (1, 2, ..) fail, and there is no pause. `refused`: as a GPU
    refuses them. `disagree`: rank 1 tells the commit of a row too few. `alone`: it throws on rank
    1. Runs in the rank's own process. REQUIRES: the engine has run."""
    from vllm.distributed.parallel_state import get_tp_group

    from nwor_specpv.vllm import faults
    from nwor_specpv.vllm.registry import current_engine
    from support.refusals import refuse_commits

    faults.PAUSE_SECONDS = 0.0
    engine, seen = current_engine(), []
    if fault == "refused":
        refuse_commits(engine, set(calls))
    elif get_tp_group().rank_in_group == 1:
        commit = engine.steps._commit

        def wrong(step: Any, counts: Any) -> Any:
            seen.extend([1] if counts.any() else [])
            if not counts.any() or len(seen) not in calls:
                return commit(step, counts)
            if fault == "alone":
                raise RuntimeError("injected")
            return commit(step, (counts - 1).clamp(min=0))

        engine.steps._commit = wrong


def break_drafting(worker: Any, rank: int, part: str, first: int, every: int) -> None:
    """On this rank a part of drafting over views fails, from the `first` call on every so many;
    `layer`: the third layer's attention, by passes. All ranks note what they propose. Runs in the
    rank's own process."""
    from vllm.distributed.parallel_state import get_tp_group

    from nwor_specpv.vllm.specpv import drafter as module
    from nwor_specpv.vllm.specpv.partial_pass import PartialPass

    drafter = worker.model_runner.drafter
    drafter.proposed, propose = [], drafter.propose

    def proposing(*args: Any, **kwargs: Any) -> Any:
        drafter.proposed.append(propose(*args, **kwargs))
        return drafter.proposed[-1]

    drafter.propose = proposing
    if get_tp_group().rank_in_group != rank:
        return
    owner, name = {
        "layer": (PartialPass, "_attend"),
        "begin": (module.ViewStore, "begin"),
        "memory": (module, "ViewStore"),
        "learn": (module.PartialViewDrafter, "_learn"),
    }[part]
    run, calls = getattr(owner, name), []

    def failing(*args: Any, **kwargs: Any) -> Any:
        if part != "layer" or args[0].layer_index[args[2].layer_name] == 2:
            calls.append(None)
            if len(calls) >= first and (len(calls) - first) % every == 0:
                raise MemoryError("injected") if part == "memory" else RuntimeError("injected")
        return run(*args, **kwargs)

    setattr(owner, name, failing)


def start_again(worker: Any) -> None:
    """Drafting over views starts once more, as when vLLM's worker has warmed up."""
    drafter = worker.model_runner.drafter
    drafter._store = drafter._tail = drafter._costs = None
    drafter.start()


def main() -> None:
    """job: start (arguments of engines.start), prompts, max_tokens, arrivals, commits (arguments of
    `break_commits`), broken (arguments of `break_drafting`), start_again."""
    from support.engines import drive, greedy, start

    job = json.loads(Path(sys.argv[1]).read_text())
    llm = start(job["start"].pop("nwor"), **job["start"])
    if job.get("commits"):
        drive(llm, job["prompts"][:1], greedy(2))  # the interceptor is made
        llm.collective_rpc(break_commits, args=tuple(job["commits"]))
    if job.get("broken"):
        llm.collective_rpc(break_drafting, args=tuple(job["broken"]))
    if job.get("start_again"):
        llm.collective_rpc(start_again)
    story = drive(llm, job["prompts"], greedy(job["max_tokens"]), arrivals=job.get("arrivals"))
    tokens = [story.tokens[str(i)] for i in range(len(job["prompts"]))]
    loaded = [name for name in sys.modules if name.startswith("nwor_specpv.vllm.engine")]
    ranks = llm.collective_rpc(rank_report)
    result = {"tokens": tokens, "ranks": ranks, "plugin": bool(loaded)}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    import conftest  # noqa: F401  (vLLM's environment)

    main()
