"""Wrong calls of every kind, sprinkled into a fuzzed world's rounds: not a byte may change."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import nwor_specpv
from nwor_specpv import NworError
from tests.python.kv_interceptor.cache_model import InterceptorModel

OUT_OF_ORDER = {  # and what the error says
    "commit without begin": "commit: no round is open; call begin and write first",
    "abort without begin": "abort: no round is open; call begin first",
    "write without begin": "write: no round is open for rows of layer",
    "second begin": "is open; commit or abort it first",
}


class WrongCalls:
    """What a World knows, and the ways to call it wrongly."""

    rng: random.Random
    tally: Counter[str]
    interceptor: nwor_specpv.Interceptor
    model: InterceptorModel
    layers: list[str]
    slots_of_group: dict[int, int]
    rows_tensor: Callable[[int], Any]
    commit_arguments: Callable[..., dict[str, Any]]
    check_bytes: Callable[[str], None]

    def refused(self, what: str, call, *args, **kwargs) -> None:
        """A wrong call: NworError, and not a byte changes."""
        try:
            call(*args, **kwargs)
        except NworError as error:
            text = str(error)
            if what in OUT_OF_ORDER:
                assert OUT_OF_ORDER[what] in text, f"{what}: message {text!r}"
            else:
                assert "got " in text, f"{what}: message {text!r}"
                assert "expected " in text, f"{what}: message {text!r}"
        else:
            raise AssertionError(f"{what}: was accepted")
        self.check_bytes(what)
        self.tally["refused: " + what] += 1

    def call_out_of_round(self) -> None:
        some = torch.zeros((1, 1), dtype=torch.int32)
        key, value, _, _ = self.rows_tensor(1)
        kind = self.rng.randrange(4)
        if kind == 0:
            self.refused("commit without begin", self.interceptor.commit, some, some[0])
        elif kind == 1:
            self.refused("abort without begin", self.interceptor.abort)
        elif kind == 2:
            self.refused(
                "write without begin",
                self.interceptor.write,
                self.layers[0],
                key,
                value,
                torch.tensor([0]),
            )
        else:
            wrong = self.rng.choice(
                (
                    ([2], [2], []),
                    ([2], [1], [[1]]),
                    ([2], [1, 1], []),
                    ([-1], [0], []),
                    ([2], [-1], []),
                )
            )
            self.refused("plan", self.interceptor.begin, nwor_specpv.RoundPlan(*wrong))

    def bad_write(self, num_rows: int, slots: dict[int, list[int]]) -> None:
        rng, layer = self.rng, self.rng.choice(self.layers)
        group = self.model.groups[layer]
        key, value, _, _ = self.rows_tensor(num_rows)
        mapping = torch.tensor(slots[group])
        call = {"layer": layer, "key": key, "value": value, "slot_mapping": mapping, "rows": None}
        total = self.slots_of_group[group]

        def poke(index: int, slot: int) -> torch.Tensor:
            changed = mapping.clone()
            changed[index] = slot
            return changed

        at = rng.randrange(num_rows)
        kinds = {
            "second begin": None,
            "key dtype": {"key": key.double()},
            "value dtype": {"value": value.double()},
            "key rank": {"key": key[0]},
            "key rows": {"key": torch.cat([key, key])},
            "value rows": {"value": value[:-1]},
            "heads": {"key": torch.cat([key, key], 1), "value": torch.cat([value, value], 1)},
            "channels": {"key": key[..., :-1]},
            "slot dtype": {"slot_mapping": mapping.int()},
            "slot rank": {"slot_mapping": mapping[:, None]},
            "slot count": {"slot_mapping": torch.cat([mapping, mapping])},
            "slot stride": {"slot_mapping": mapping.repeat_interleave(2)[::2]},
            "slot below -1": {"slot_mapping": poke(at, rng.choice((-2, -(2**40))))},
            "slot beyond the cache": {"slot_mapping": poke(at, rng.choice((total, 2**33)))},
            "row out of range": {"rows": [*range(num_rows - 1), num_rows]},
            "row negative": {"rows": [*range(num_rows - 1), -1]},
        }
        if num_rows > 1:
            kinds["row twice"] = {"rows": [0, 0, *range(2, num_rows)]}
        direct = [
            row
            for row in range(num_rows)
            if row not in self.model.parent and slots[group][row] >= 0
        ]
        if len(direct) > 1:
            kinds["two rows to one slot"] = {
                "slot_mapping": poke(direct[0], slots[group][direct[1]])
            }
        what = rng.choice(list(kinds))
        if what == "second begin":
            self.refused(what, self.interceptor.begin, nwor_specpv.RoundPlan([1], [0]))
        elif what == "slot stride" and num_rows == 1:
            return
        else:
            self.refused(what, self.interceptor.write, **(call | kinds[what]))

    def bad_commit(self, part, part_slots) -> None:
        rng = self.rng
        call = self.commit_arguments(part, part_slots) | {"last": rng.random() < 0.5}
        path, counts, slots = call["path"], call["counts"], call["slots"]
        depth = path.shape[1]
        kinds: dict[str, dict] = {
            "path dtype": {"path": path.long()},
            "path rank": {"path": path[None]},
            "counts dtype": {"counts": counts.long()},
            "counts size": {"counts": torch.cat([counts, counts])},
            "counts rank": {"counts": counts[:, None]},
            "path requests": {"path": torch.cat([path, path])},
            "rows": {"rows": "slot"},
        }
        if slots is not None:
            kinds["slots dtype"] = {"slots": [s.int() for s in slots]}
            kinds["slots rank"] = {"slots": [s[None] for s in slots]}
            kinds["slots groups"] = {"slots": [*slots, slots[0]]}
        # Wrong values are the more interesting ones, and some are rarely possible.
        values: dict[str, dict] = {
            "count beyond depth": {"counts": counts + depth + 1},
            "negative count": {"counts": counts - depth - 1},
        }
        full = [b for b, rows in enumerate(part) if rows]
        if full:
            b = rng.choice(full)
            i = rng.randrange(len(part[b]))
            for what, entry in (
                ("row beyond the batch", 1000),
                ("negative row", -1),
                ("a root", 0),
            ):
                wrong = path.clone()
                wrong[b, i] = (
                    entry
                    if what != "a root" or call["rows"] == "request"
                    else self.model.first_row[b]
                )
                values[what] = {"path": wrong}
            if len(part[b]) > 1:
                wrong = path.clone()
                wrong[b, : len(part[b])] = path[b, : len(part[b])].flip(0)
                values["a path upwards"] = {"path": wrong}
                wrong = path.clone()
                wrong[b, 0] = path[b, 1]
                values["a path that skips"] = {"path": wrong}
            if slots is not None:
                g = rng.randrange(len(slots))
                total = self.slots_of_group[g]
                for what, slot in (
                    ("slot beyond", total),
                    ("slot negative", -1),
                    ("slot far", 2**40),
                ):
                    wrong = slots[g].clone()
                    wrong[b, i] = slot
                    values[what] = {"slots": [*slots[:g], wrong, *slots[g + 1 :]]}
                places = [(b2, j) for b2 in full for j in range(len(part[b2])) if (b2, j) != (b, i)]
                if places:
                    wrong = slots[g].clone()
                    wrong[b, i] = wrong[rng.choice(places)]
                    values["one slot twice"] = {"slots": [*slots[:g], wrong, *slots[g + 1 :]]}
            base = self.model.first_row[b] if call["rows"] == "request" else 0
            ends = [*self.model.first_row[1:], 10**6]
            own = range(self.model.first_row[b], ends[b])
            strangers = [row for row in self.model.parent if row not in own]
            if strangers:
                wrong = path.clone()
                wrong[b, i] = rng.choice(strangers) - base
                values["a row of another request"] = {"path": wrong}
        rare = [what for what in ("one slot twice", "a row of another request") if what in values]
        if rare and rng.random() < 0.4:
            what = rng.choice(rare)
        else:
            what = rng.choice(list(values if rng.random() < 0.7 else kinds))
        self.refused(what, self.interceptor.commit, **(call | (kinds | values)[what]))
