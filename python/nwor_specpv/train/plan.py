"""The options of a training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from nwor_specpv.errors import NworError

from .corpus import MOST_LENGTH, WritingStyle
from .unroll import MAX_STEPS

MEASURED_STEPS = 6
_LEAST_ANSWER = 96  # limits on written answers are drawn from here to the longest


@dataclass
class TrainingPlan:
    """The options of a run. The defaults are for one large GPU."""

    minutes: float = 5.0
    cycles: int = 2  # how often new texts are written
    collect_share: float = 0.25  # of the time
    tokens: int = 12_600_000  # the most of a cycle: all are kept, with their features
    rows: int = 4096  # written at once
    length: int = 512  # tokens of a row
    batch_tokens: int = 16384
    steps: int = 6  # unrolled
    early_steps: int = 6  # until `deepen_from` of the training
    deepen_from: float = 0.0
    step_decay: float = 0.9  # weight of a step relative to the one before
    intermediate: int = 2048
    window: int = 512
    draft_vocabulary: int = 16384  # trained: the most frequent tokens
    listed_vocabulary: int = 0  # tokens in the file, if more: the rarer ones can be drafted too
    optimizer: str = "muon"
    learning_rate: float = 5e-3
    weight_decay: float = 0.02
    label_temperature: float = 0.6  # at the end; 1 until `sharpen_from` of the training
    sharpen_from: float = 0.4
    measure_seconds: float = 60.0
    measure_tokens: int = 160  # of a measured answer
    answer_tokens: int = WritingStyle.answer[1]  # of a written answer, at most
    updates: int = 0  # the most updates; 0: until the time is over
    seed: int = 0
    start: str = ""  # file of a head of the same shape to continue from
    keep_start: float = 0.0  # share of its weights in the average at the end
    style: WritingStyle = field(default_factory=WritingStyle)

    def __post_init__(self) -> None:
        def require(name: str, right: bool, expected: str) -> None:
            if not right:
                raise NworError(f"{name}: got {getattr(self, name)}, expected {expected}")

        for name in ("steps", "early_steps"):
            require(name, 1 <= getattr(self, name) <= MAX_STEPS, f"1 to {MAX_STEPS}")
        # A prediction lies in the same row, also in the steps of a measurement.
        least = max(self.steps, self.early_steps, MEASURED_STEPS) + 1
        require("length", least <= self.length <= MOST_LENGTH, f"{least} to {MOST_LENGTH}")
        for name in ("cycles", "tokens", "rows", "batch_tokens", "intermediate", "window"):
            require(name, getattr(self, name) >= 1, "1 or more")
        for name in ("draft_vocabulary", "measure_tokens", "answer_tokens"):
            require(name, getattr(self, name) >= 1, "1 or more")
        for name in ("updates", "listed_vocabulary"):
            require(name, getattr(self, name) >= 0, "0 or more")
        for name in ("keep_start", "collect_share", "deepen_from"):
            require(name, 0 <= getattr(self, name) <= 1, "0 to 1")
        require("sharpen_from", 0 <= self.sharpen_from < 1, "0 to less than 1")
        for name in ("learning_rate", "weight_decay"):
            right = 0 <= getattr(self, name) < math.inf
            require(name, right, "a finite number, 0 or more")
        require("label_temperature", 0 < self.label_temperature < math.inf, "more than 0")
        require("minutes", 0 < self.minutes < math.inf, "a finite number above 0")
        require("measure_seconds", self.measure_seconds > 0, "more than 0")
        require("step_decay", 0 < self.step_decay <= 1, "more than 0, 1 at most")
        low, high = -(2**63), 2**64 - 1  # torch's
        require("seed", low <= self.seed <= high, f"{low} to {high}")
        require("optimizer", self.optimizer in ("muon", "adamw"), "muon or adamw")
        require("start", not self.start or Path(self.start).is_file(), "a file of a head")
        most = self.answer_tokens
        if most != WritingStyle.answer[1]:
            self.style = replace(self.style, answer=(min(_LEAST_ANSWER, most), most))
        if self.keep_start and not self.start:
            raise NworError(
                f"keep_start: got {self.keep_start} without start; give the file of a head"
            )
