"""Trains an EAGLE3 head for a Llama or Qwen2 on texts that the target writes itself.

    python -m nwor_specpv.train.eagle3 --target FOLDER --out DIR --minutes 5 --device cuda

Writes DIR/eagle3.safetensors, DIR/training.json and the card DIR/eagle3.md after every measurement.
--resume goes on with a run that was broken off, from its latest measurement. Without --target the
head is for SmolLM2-135M-Instruct. About a quarter of the time goes into writing texts, the rest
into training, with a measurement on held-out prompts every minute.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from nwor_specpv._files import write_whole
from nwor_specpv.cli.parser import require_device
from nwor_specpv.drafters.eagle3_head import Eagle3Head, HeadShape
from nwor_specpv.errors import NworError

from . import prompts
from .card import card
from .corpus import Corpus, CorpusWriter, WritingStyle
from .measure import summary
from .plan import MEASURED_STEPS, TrainingPlan
from .progress import CARD, HEAD, RECORD, Progress, plan_record, read_progress
from .prompt_file import read_prompts, read_stop_tokens, write_prompts
from .target import TrainingTarget
from .unroll import Unroll, UnrollBatch, make_batch, ranks, soft_loss

_NEARLY_ALL = 0.95  # of the minutes; with fewer left a run does not go on


class Training:
    """One run: texts, head, optimiser and measurements."""

    def __init__(
        self,
        target: TrainingTarget,
        openings: list[Any],
        held_out: list[Any],
        plan: TrainingPlan,
        out: Path,
        *,
        name: str = "",
        progress: Progress | None = None,
    ) -> None:
        """`name`: of the target, for the card. `progress`: of a run that this one goes on with."""
        if plan.length > target.context:
            raise NworError(
                f"length: got {plan.length}, expected at most {target.context}, the target's "
                "context"
            )
        progress = progress or Progress()
        self.target, self.plan, self.out, self._name = target, plan, out, name
        self._shape = head_shape(target, plan)
        # Read once: `measure` may write to the same file.
        self._start = self._load_start() if plan.start else {}
        self._resumed = None if progress.head is None else self._load("resume", progress.head)
        self.began = time.monotonic() - progress.seconds
        self.trained_seconds, self.text_seconds = progress.trained_seconds, 0.0
        self.trained_tokens, self.updates = progress.trained_tokens, progress.updates
        self.written_tokens, self._cycle = progress.written_tokens, progress.cycle
        self.history: list[dict[str, Any]] = list(progress.history)
        self._covered = 0.0
        self._ended = False
        # What goes on writes other texts.
        torch.manual_seed((plan.seed + self.updates) % 2**63 if self.updates else plan.seed)
        self._writer = CorpusWriter(target, openings, plan.style)
        self._opening_sizes = _sizes(openings)
        rows = max(1, plan.tokens // (plan.rows * plan.length)) * plan.rows
        self._corpus = Corpus.empty(rows, plan.length, target)
        self._held_out = self._write_held_out(held_out)
        self.text_seconds = time.monotonic() - self.began - progress.seconds
        self._head: Eagle3Head | None = None

    # ---- the parts of a run ----

    def run(self) -> None:
        plan = self.plan
        seconds = plan.minutes * 60
        for index in range(self._cycle, plan.cycles):
            self._cycle = index
            collected = self._collect(seconds * plan.collect_share / plan.cycles)
            self.say(f"cycle {index + 1}: {collected.num_tokens:,} tokens written")
            if self._head is None:
                self._make_head(collected)
            # Some time is left for the last measurement and for saving.
            left = seconds - (time.monotonic() - self.began)
            later = seconds * plan.collect_share / plan.cycles * (plan.cycles - 1 - index)
            share = max(0.0, left - later - 0.02 * seconds) / (plan.cycles - index)
            self._train(collected, share, plan.cycles - index)
        if not self.updates:
            raise NworError(
                f"minutes: got {plan.minutes}, of which texts took {self.text_seconds / 60:.3f}: "
                f"no time is left for an update; give more minutes, or fewer than {plan.rows} "
                f"rows of length {plan.length}"
            )
        self._ended = not plan.keep_start
        self.measure()
        if plan.keep_start:
            self._ended = True
            with torch.no_grad():
                for name, begun in self._start.items():
                    self._head.weights[name].lerp_(begun, plan.keep_start)
            self.measure()

    def _collect(self, seconds: float) -> Corpus:
        """Writes rows for that time, at least once."""
        plan, corpus = self.plan, self._corpus
        begin = time.monotonic()
        done = 0
        while done + plan.rows <= corpus.tokens.shape[0]:
            self._writer.write(corpus, done, plan.rows)
            self._wait()
            done += plan.rows
            taken = time.monotonic() - begin
            if taken * (1 + plan.rows / done) > seconds:
                break
        self.target.release()
        self._empty()
        self.text_seconds += time.monotonic() - begin
        found = corpus.rows(slice(0, done))
        self.written_tokens += found.num_tokens
        return found

    def _make_head(self, corpus: Corpus) -> None:
        target, plan = self.target, self.plan
        self._require_answers(corpus)
        counted = corpus.weight > 0
        chosen = torch.cat([corpus.best[counted], corpus.tokens[:, 1:][counted[:, :-1]]]).long()
        frequency = torch.bincount(chosen, minlength=target.vocabulary)
        listed = max(plan.draft_vocabulary, plan.listed_vocabulary)
        kept = frequency.argsort(descending=True, stable=True)[:listed]
        trained = kept[: plan.draft_vocabulary]
        begun = {name: weight.clone() for name, weight in self._start.items()}
        if self._resumed is not None:
            kept = self._resumed.draft_to_target.to(target.device).long()
            trained = kept[: plan.draft_vocabulary]
            begun = self._weights_of(self._resumed)
        self._covered = float(frequency[trained].sum() / frequency.sum())
        self.say(f"draft vocabulary: {len(trained)} tokens cover {self._covered:.4%}")
        weights = begun or initial_weights(self._shape, target)
        self._head = Eagle3Head(self._shape, weights, kept)
        for weight in self._head.weights.values():
            weight.requires_grad_()
        self._trained, self._listed = (self._vocabulary(tokens) for tokens in (trained, kept))
        self._optimizers: list[torch.optim.Optimizer] = []
        self.say(f"head: {self._head.num_parameters:,} parameters")
        if plan.start and self._resumed is None:
            self.measure(save=False)  # before any update

    def _require_answers(self, corpus: Corpus) -> None:
        """Raises unless some entry predicts a token with weight."""
        same = corpus.start[:, 1:] == corpus.start[:, :-1]
        if not ((corpus.weight[:, 1:] > 0) & same).any():
            raise NworError(
                f"length: got {self.plan.length}, too short: the target wrote nothing in "
                f"{corpus.tokens.shape[0]} rows; openings have {self._opening_sizes}"
            )

    def _load_start(self) -> dict[str, torch.Tensor]:
        """Weights of the head to continue from and to average with."""
        return self._weights_of(self._load("start", Path(self.plan.start)))

    def _load(self, option: str, path: Path) -> Eagle3Head:
        head = Eagle3Head.load(path)
        if head.shape != self._shape:
            raise NworError(f"{option}: got a head of {head.shape}, expected {self._shape}")
        return head

    def _weights_of(self, head: Eagle3Head) -> dict[str, torch.Tensor]:
        return {
            name: weight.to(self.target.device, torch.float32)
            for name, weight in head.weights.items()
        }

    def _vocabulary(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft ids of all tokens (-1: none), and the output matrix."""
        to_draft = torch.full((self.target.vocabulary,), -1, device=self.target.device)
        to_draft[tokens] = torch.arange(len(tokens), device=self.target.device)
        return to_draft, self.target.output[tokens].contiguous()

    def _train(self, corpus: Corpus, seconds: float, cycles_left: int) -> None:
        plan, begin, before = self.plan, time.monotonic(), self.trained_seconds
        # The schedule runs over all cycles and assumes that later ones take as long as this one.
        total = before + seconds * cycles_left
        rows = max(1, plan.batch_tokens // plan.length)
        said = measured = begin
        for index in _shuffled(corpus.tokens.shape[0], rows, self.target.device):
            now = time.monotonic()
            if now - begin >= seconds or (plan.updates and self.updates >= plan.updates):
                break
            self.trained_seconds = before + now - begin
            progress = self.trained_seconds / max(total, 1e-9)
            if plan.updates:
                progress = self.updates / plan.updates
            self._update(corpus.rows(index), progress)
            self.updates += 1
            self.trained_tokens += index.numel() * plan.length
            if self.updates % 8 == 0:
                self._wait()  # so that the clock measures the device, not the queue
            if now - said > 15:
                said = now
                self.say(f"update {self.updates}, {self.trained_tokens:,} tokens")
            if now - measured > plan.measure_seconds:
                measured = now
                self.measure()
        self._wait()
        self.trained_seconds = before + time.monotonic() - begin

    def _update(self, rows: Corpus, progress: float) -> None:
        plan, head = self.plan, self._head
        if not self._optimizers:
            self._optimizers = list(make_optimizers(head, plan))
        rate = min(1.0, progress / 0.03, (1 - progress) / 0.65)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * max(rate, 0.0)
        sharper = max(0.0, progress - plan.sharpen_from) / (1 - plan.sharpen_from)
        temperature = 1 - min(1.0, sharper) * (1 - plan.label_temperature)
        steps = plan.steps if progress >= plan.deepen_from else plan.early_steps
        self._find_gradients(rows, steps, temperature)
        torch.nn.utils.clip_grad_norm_(list(head.weights.values()), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _find_gradients(self, rows: Corpus, steps: int, label_temperature: float) -> None:
        plan, working = self.plan, self._head.to(self.target.dtype)
        batch = self._batch(rows, working, self._trained, label_temperature)
        unroll, loss = Unroll(working, batch), 0.0
        for step in range(steps):
            normed = unroll.step()[: -step - 1]
            weight = batch.ahead(step)
            weight = weight * (plan.step_decay**step / weight.sum().clamp(min=1.0))
            loss = loss + soft_loss(
                normed, self._trained[1], batch.probabilities[step + 1 :], weight
            )
        loss.backward()

    def measure(self, *, save: bool = True) -> dict[str, Any]:
        """Measures acceptance on the held-out prompts; saves the head and all measurements."""
        self._check_weights()
        working = self._head.to(self.target.dtype)
        held_out = self._held_out
        parts = torch.arange(held_out.tokens.shape[0]).to(self.target.device).split(32)
        batches = (self._batch(held_out.rows(part), working, self._listed) for part in parts)
        placed = [ranks(working, batch, self._listed[1], MEASURED_STEPS).cpu() for batch in batches]
        entry = {
            "seconds": round(time.monotonic() - self.began, 1),
            "updates": self.updates,
            "trained_tokens": self.trained_tokens,
            "written_tokens": self.written_tokens,
            "held_out": summary(torch.cat(placed, dim=1), held_out),
        }
        self.history.append(entry)
        if save:
            self._save()
        self.say(json.dumps(entry["held_out"]))
        return entry

    def _save(self) -> None:
        self._head.save(self.out / HEAD)
        target, last = self.target, self.history[-1]
        report = {
            "plan": plan_record(self.plan),
            "head": {
                "target": self._name or "a target without a name",
                "num_layers": target.num_layers,
                "feature_layers": list(target.feature_layers),
                "vocabulary": target.vocabulary,
                "draft_vocabulary": len(self._head.draft_to_target),
                "trained_vocabulary": len(self._trained[1]),
                "covered": round(self._covered, 6),
            },
            "parameters": self._head.num_parameters,
            "device": _device_name(target.device),
            "dtype": str(target.dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "progress": {
                "cycle": self._cycle,
                "seconds": last["seconds"],
                "trained_seconds": round(self.trained_seconds, 1),
                "ended": self._ended,
            },
            "measured": self.history,
        }
        write_whole(self.out / RECORD, json.dumps(report, indent=1) + "\n")
        write_whole(self.out / CARD, card(report))

    def _check_weights(self) -> None:
        """What is saved takes the place of a head that may have been good."""
        for name, weight in self._head.weights.items():
            wrong = int((~weight.isfinite()).sum())
            if wrong:
                raise NworError(
                    f"{name}: {wrong} of {weight.numel()} weights are not finite after "
                    f"{self.updates} updates; try a learning_rate below {self.plan.learning_rate}"
                )

    def say(self, sentence: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {sentence}", file=sys.stderr, flush=True)

    # ---- pieces ----

    def _batch(
        self,
        rows: Corpus,
        working: Eagle3Head,
        vocabulary: tuple[torch.Tensor, torch.Tensor],
        temperature: float = 1.0,
    ) -> UnrollBatch:
        return make_batch(rows, working, self.target.embedding, *vocabulary, temperature)

    def _write_held_out(self, held_out: list[Any]) -> Corpus:
        plan = self.plan
        limit = (plan.measure_tokens, plan.measure_tokens)
        style = WritingStyle(1.0, 0.0, limit, 0.0, plan.style.stop_tokens)
        # Rows may be far longer, and each position is a step.
        longest = max(len(one.tokens) + one.invented[1] + len(one.answer) for one in held_out)
        least = MEASURED_STEPS + 1
        length = min(plan.length, max(least, longest + plan.measure_tokens + 1))
        corpus = Corpus.empty(len(held_out), length, self.target)
        CorpusWriter(self.target, held_out, style).write(corpus, 0, len(held_out))
        self.target.release()
        answered = int(((corpus.weight >= 1) & (corpus.start == 0)).any(dim=1).sum())
        if not answered:
            raise NworError(
                f"length: got {plan.length}, too short: no answer to any of {len(held_out)} "
                f"held-out prompts; they have {_sizes(held_out)}"
            )
        if answered < len(held_out):
            self.say(
                f"held out: {len(held_out) - answered} of {len(held_out)} prompts have no answer "
                f"within length {plan.length} and are not measured"
            )
        return corpus

    def _wait(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)

    def _empty(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.empty_cache()


def head_shape(target: TrainingTarget, plan: TrainingPlan) -> HeadShape:
    """The shape of the head that the plan makes for the target."""
    return HeadShape(
        hidden=target.hidden,
        intermediate=plan.intermediate,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        target_vocabulary=target.vocabulary,
        feature_layers=target.feature_layers,
        window=plan.window,
        rope_theta=target.rope_theta,
        norm_epsilon=target.norm_epsilon,
    )


def initial_weights(shape: HeadShape, target: TrainingTarget) -> dict[str, torch.Tensor]:
    """Random matrices; the MLP and the last norm are copied from the target's last layer.

    They lead into the output matrix, which is the target's and is not trained.
    """
    weights = {}
    for name, size in shape.sizes().items():
        if name.endswith("norm"):
            weights[name] = torch.ones(size)
        else:
            weights[name] = torch.randn(size) * size[-1] ** -0.5
    weights["attention_output"] *= 0.5
    weights["down"] *= 0.5
    last = target.layers[-1]
    kept = min(shape.intermediate, target.intermediate)
    gate, up = weights["gate_up"].chunk(2)
    own_gate, own_up = last["gate_up"].float().cpu().chunk(2)
    gate[:kept], up[:kept] = own_gate[:kept], own_up[:kept]
    weights["down"][:, :kept] = last["down"].float().cpu()[:, :kept]
    weights["mlp_norm"] = last["mlp_norm"].float().cpu().clone()
    weights["norm"] = target.norm.float().cpu().clone()
    return {name: weight.to(target.device).contiguous() for name, weight in weights.items()}


def make_optimizers(head: Eagle3Head, plan: TrainingPlan) -> Iterator[torch.optim.Optimizer]:
    matrices = {name for name in head.weights if not name.endswith("norm")}
    wide = [weight for name, weight in head.weights.items() if name in matrices]
    others = [weight for name, weight in head.weights.items() if name not in matrices]
    fused = wide[0].is_cuda
    adam = {"betas": (0.9, 0.98), "fused": fused}
    if plan.optimizer == "muon":
        # Updates as large as AdamW's, so that both use one learning rate.
        yield torch.optim.Muon(
            [{"params": wide, "peak": plan.learning_rate}],
            lr=plan.learning_rate,
            weight_decay=plan.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
    else:
        group = {"params": wide, "peak": plan.learning_rate}
        yield torch.optim.AdamW([group], weight_decay=plan.weight_decay, **adam)
    group = {"params": others, "peak": min(plan.learning_rate, 2e-3)}
    yield torch.optim.AdamW([group], weight_decay=0.0, **adam)


def _shuffled(count: int, rows: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Yields batches of row indices for ever; each row comes once before any repeats."""
    while True:
        order = torch.randperm(count, device=device)
        yield from (
            order.split(rows) if count < 2 * rows else order[: count - count % rows].split(rows)
        )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _sizes(openings: list[prompts.Opening]) -> str:
    sizes = [len(opening.tokens) for opening in openings]
    return f"{min(sizes)} to {max(sizes)} tokens"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nwor_specpv.train.eagle3", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder for the head")
    parser.add_argument("--target", type=Path, help="Hugging Face folder of a Llama or Qwen2")
    parser.add_argument("--prompts", type=Path, help="file of encoded prompts; written if missing")
    there = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", default=there, help="cpu or cuda, default: cuda if there is one"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in --out, if there is one"
    )
    for name, value in asdict(TrainingPlan()).items():
        if isinstance(value, (int, float, str)):
            flag = f"--{name.replace('_', '-')}"
            parser.add_argument(flag, type=type(value), default=value, help=f"default: {value}")
    options = vars(parser.parse_args(arguments))
    out, device = options.pop("out"), options.pop("device")
    folder, path = options.pop("target"), options.pop("prompts")
    resume = options.pop("resume")
    try:
        plan = TrainingPlan(**options)
        require_device(device)
        device = torch.device(device)
        out.mkdir(parents=True, exist_ok=True)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        own = folder is None
        if own:
            from nwor_specpv.models import smollm2

            folder = smollm2(str(dtype).removeprefix("torch."))
        path = path or out / "prompts.json"
        if not path.is_file():
            write_prompts(folder, path)
        target = TrainingTarget(folder, device=device, dtype=dtype)
        openings, held_out = read_prompts(path, target.vocabulary)
        style = replace(plan.style, stop_tokens=read_stop_tokens(path, target.vocabulary))
        plan = replace(plan, style=style)
        progress = read_progress(out, plan) if resume else Progress()
        if progress.ended or progress.seconds >= _NEARLY_ALL * 60 * plan.minutes:
            print(f"train.eagle3: the run in {out} has had its {plan.minutes:g} minutes")
            return 0
        name = "SmolLM2-135M-Instruct" if own else Path(folder).resolve().name
        Training(target, openings, held_out, plan, out, name=name, progress=progress).run()
    except (NworError, OSError) as error:
        print(f"train.eagle3: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
