"""The card of a trained head: what it was made from, how, and what it has reached."""

from __future__ import annotations

from typing import Any


def card(report: dict[str, Any]) -> str:
    """A page in Markdown from what training.json has."""
    plan, last, head = report["plan"], report["measured"][-1], report["head"]
    layers = ", ".join(map(str, head["feature_layers"]))
    style = plan["style"]
    low, high = style["answer"]
    facts = {
        "target": f"{head['target']}, {head['num_layers']} layers",
        "parameters": f"{report['parameters']:,} of its own",
        "features": f"outputs of layers {layers}, counted from 0",
        "draft vocabulary": f"{head['draft_vocabulary']:,} of {head['vocabulary']:,} tokens; the "
        f"{head['trained_vocabulary']:,} trained ones cover {head['covered']:.2%} of the target's "
        "choices in the texts",
        "window": f"{plan['window']} entries",
        "texts": f"{last['written_tokens']:,} tokens that the target wrote, in rows of "
        f"{plan['length']}; answers of at most {low} to {high} tokens, "
        f"{style['greedy_share']:.0%} of them greedy",
        "training": f"{last['updates']:,} updates of {plan['batch_tokens']:,} tokens, "
        f"{last['trained_tokens']:,} in all; {plan['optimizer']}, learning rate "
        f"{plan['learning_rate']:g}",
        "time": f"{last['seconds']:.0f} s in all, {report['device']}, {report['dtype']}",
        "state": "ended" if report["progress"]["ended"] else "not ended yet",
    }
    lines = [f"# EAGLE3 head for {head['target']}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    depths = len(next(iter(last["held_out"].values()))["top1_by_depth"])
    lines += [
        "",
        "On held-out prompts that the target answered greedily, answers of up to "
        f"{plan['measure_tokens']} tokens: tokens per step, the target's own included, and how "
        "often the head's first guess is the target's choice, by depth, with the right tokens "
        "before it. They are estimates from the head's ranks; `python -m "
        "nwor_specpv.train.acceptance` measures the drafter.",
        "",
        "| | chain of 4 | tree 4, 3, 2, 1 | "
        + " | ".join(f"depth {depth + 1}" for depth in range(depths))
        + " |",
        "|---" * (3 + depths) + "|",
    ]
    for kind, found in last["held_out"].items():
        steps = [f"{found[name]:.2f}" for name in ("chain_4", "widths_4321")]
        hits = [f"{hit:.2f}" for hit in found["top1_by_depth"]]
        lines.append(f"| {kind} | {' | '.join([*steps, *hits])} |")
    return "\n".join(lines) + "\n"
