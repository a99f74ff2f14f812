"""Random rounds through a real interceptor and through the Python model, over the same bytes.

A world is one interceptor with a few tiny layers in random layouts; it lives for some hundred
rounds. Every cache is a byte array shared with torch, with guard bytes around it, so a comparison
is one comparison of two byte strings and also sees writes outside the cache.
"""

from __future__ import annotations

import random
from collections import Counter

import torch

import nwor_specpv
from tests.python.kv_interceptor.cache_model import (
    ELEMENT_BYTES,
    GUARD_BYTES,
    CacheModel,
    InterceptorModel,
)
from tests.python.kv_interceptor.wrong_calls import WrongCalls

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
LAYOUTS = ("separate", "two_pages", "pages_2", "head_major", "packed", "padded")


def torch_views(
    memory: bytearray, layout: str, pages: int, tokens: int, heads: int, dim: int, dtype: str
):
    """[P, S, H, D] views of K and V as an engine would make them from its own tensor."""
    flat = torch.frombuffer(memory, dtype=torch.uint8)[GUARD_BYTES:-GUARD_BYTES].view(
        TORCH_DTYPES[dtype]
    )
    if layout == "separate":
        key, value = flat.chunk(2)
        return key.view(pages, tokens, heads, dim), value.view(pages, tokens, heads, dim)
    if layout == "two_pages":
        return flat.view(2, pages, tokens, heads, dim).unbind(0)
    if layout == "pages_2":
        return flat.view(pages, 2, tokens, heads, dim).unbind(1)
    if layout == "head_major":
        return flat.view(2, pages, heads, tokens, dim).transpose(2, 3).unbind(0)
    if layout == "packed":
        return flat.view(pages, heads, tokens, 2 * dim).transpose(1, 2).chunk(2, dim=-1)
    rows = flat.view(pages, tokens, 4, heads, dim)  # padded: K, a gap, V, a gap
    return rows[:, :, 0], rows[:, :, 2]


class World(WrongCalls):
    """One interceptor, its caches and the model beside it."""

    def __init__(
        self, cache_dtype: str, rng: random.Random, *, tight: bool = False, checked: bool = False
    ):
        """tight: staging holds next to nothing, so rounds are written directly. checked: the
        contract checker watches every round."""
        self.rng, self.cache_dtype = rng, cache_dtype
        self.tally: Counter[str] = Counter()  # what was really played
        fp8 = cache_dtype == "float8_e4m3fn"
        self.row_dtype = rng.choice(("float32", "float16", "bfloat16")) if fp8 else cache_dtype
        self.heads, self.dim = rng.choice((1, 2)), rng.choice((8, 12, 16))
        self.num_groups = rng.choice((1, 1, 2))
        self.layers = [f"layer{i}" for i in range(rng.randint(self.num_groups, 3))]
        groups = {name: i % self.num_groups for i, name in enumerate(self.layers)}
        self.tight = (
            rng.random() < 0.05
        )  # staging holds next to nothing: rounds are written directly
        config = nwor_specpv.NworConfig(staging_rows=rng.choice((0, 4, 64)))
        if self.tight:
            config.max_staging_bytes = rng.randint(1, 4000)
        self.interceptor = nwor_specpv.Interceptor(config)
        self.memory: list[bytearray] = []
        self.scales: list[torch.Tensor] = []
        caches = {}
        self.slots_of_group: dict[int, int] = {}
        shapes = {}
        for name in self.layers:
            group = groups[name]
            if group not in shapes:
                shapes[group] = (rng.choice(LAYOUTS), rng.randint(5, 9), rng.choice((1, 2, 4)))
            layout, pages, tokens = shapes[group]
            shape = (layout, pages, tokens, self.heads, self.dim, cache_dtype)
            memory = bytearray(rng.randbytes(CacheModel.memory_bytes(*shape)))
            model = CacheModel(memory, *shape)
            key, value = torch_views(memory, *shape)
            scales = {}
            if fp8 and rng.random() < 0.8:
                for side in ("k_scale", "v_scale"):
                    numbers = [
                        rng.choice((1.0, 0.37, 0.015625, 3.1))
                        for _ in range(rng.choice((1, self.heads)))
                    ]
                    scales[side] = torch.tensor(numbers)
                    setattr(model, side, scales[side].tolist())
            self.interceptor.bind_layer(
                name,
                key,
                value,
                group=group,
                dtype=TORCH_DTYPES[self.row_dtype] if fp8 else None,
                **scales,
            )
            self.memory.append(memory)
            caches[name] = model
            self.slots_of_group[group] = pages * tokens
        self.model = InterceptorModel(caches, groups, self.row_dtype)
        self.checker = nwor_specpv.ContractChecker(self.interceptor) if checked else None

    # ---- comparison ----

    def check_bytes(self, what: str) -> None:
        for name, memory in zip(self.layers, self.memory, strict=True):
            shadow = self.model.caches[name].memory
            if memory != shadow:
                at = next(i for i, (a, b) in enumerate(zip(memory, shadow, strict=True)) if a != b)
                raise AssertionError(
                    f"{what}: {name} differs from the model at byte {at} of {len(memory)}"
                )

    def check_counts(self) -> None:
        stats = self.interceptor.stats()
        got = {key: stats[key] for key in self.model.counts}
        assert got == self.model.counts, f"counts: got {got}, the model has {self.model.counts}"

    # ---- a round ----

    def rows_tensor(self, count: int):
        """Random bits as K and V rows, NaN included; sometimes strided as in a fused projection."""
        row = self.heads * self.dim * ELEMENT_BYTES[self.row_dtype]
        dtype, rng = TORCH_DTYPES[self.row_dtype], self.rng
        if count and rng.random() < 0.3:
            raw = bytearray(rng.randbytes(count * 2 * row))
            fused = torch.frombuffer(raw, dtype=dtype).view(count, 2 * self.heads, self.dim)
            keys = [bytes(raw[i * 2 * row : i * 2 * row + row]) for i in range(count)]
            values = [bytes(raw[i * 2 * row + row : (i + 1) * 2 * row]) for i in range(count)]
            return fused[:, : self.heads], fused[:, self.heads :], keys, values
        tensors, lists = [], []
        for _ in range(2):
            raw = rng.randbytes(count * row)
            shape = (count, self.heads, self.dim)
            tensors.append(
                torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)
                if count
                else torch.empty(shape, dtype=dtype)
            )
            lists.append([raw[i * row : (i + 1) * row] for i in range(count)])
        return (*tensors, *lists)

    def plan(self):
        rng = self.rng
        query_lens, num_drafts, parents = [], [], []
        tree = rng.random() < 0.5
        for _ in range(rng.choice((1, 1, 2, 3))):
            direct, drafts = rng.choice((1, 1, 1, 2, 4)), rng.choice((0, 1, 2, 3, 5))
            query_lens.append(direct + drafts)
            num_drafts.append(drafts)
            parents.append([rng.randint(direct - 1, direct + i - 1) for i in range(drafts)])
        return query_lens, num_drafts, parents if tree else []

    def play_round(self, bad_inputs: bool) -> None:
        rng, model, interceptor = self.rng, self.model, self.interceptor
        query_lens, num_drafts, parents = self.plan()
        num_rows = sum(query_lens)
        if num_rows > min(self.slots_of_group.values()):
            return self.play_round(bad_inputs)
        if bad_inputs and rng.random() < 0.2:
            self.call_out_of_round()
        if self.checker is not None:
            self.checker.snapshot()
        if rng.random() < 0.02:
            self.play_disabled_round()
        decision = interceptor.begin(nwor_specpv.RoundPlan(query_lens, num_drafts, parents))
        drafts = sum(num_drafts)
        if not self.tight:
            assert decision.stage == (drafts > 0), decision
        model.begin(query_lens, num_drafts, parents, decision.stage)
        self.tally["trees"] += bool(parents)
        self.refusing: set[str] = set()  # why this round cannot be committed
        slots = self.choose_slots(num_rows)
        bad_at = rng.choice((0, 1, 2, 2)) if bad_inputs else None
        if bad_at == 0:
            self.bad_write(num_rows, slots)
        skipped = rng.choice(self.layers) if decision.stage and rng.random() < 0.03 else None
        self.write_layers(num_rows, slots, decision.epoch, bad_at == 1, skipped)
        self.check_bytes("after the writes")
        if decision.stage and any(
            (layer, row) not in model.staged for layer in self.layers for row in model.parent
        ):
            self.refusing.add("incomplete_staging")
        if self.checker is not None:
            assert self.checker.verify_staged() == []
        receipt, emitted = None, []
        if rng.random() < 0.04:
            self.fall_back(num_rows, slots, decision.epoch)
        if not decision.stage or rng.random() < 0.12:
            interceptor.abort()
            model.end(aborted=True)
            self.tally["aborts" if decision.stage else "direct rounds"] += 1
        elif self.refusing:
            receipt = self.commit_refused(query_lens, num_drafts)
            model.end(aborted=False, failed=True)
        else:
            receipt, emitted = self.commit_round(query_lens, num_drafts, bad_at == 2)
            model.end(aborted=receipt is None)
        self.check_bytes("after the round")
        if self.checker is not None:
            assert self.checker.verify(receipt, emitted) == []
            self.tally["checked"] += 1
        return None

    def choose_slots(self, num_rows: int) -> dict[int, list[int]]:
        """Each group's slot of every row; a row that is no draft may have none."""
        slots = {
            group: self.rng.sample(range(total), num_rows)
            for group, total in self.slots_of_group.items()
        }
        if self.rng.random() < 0.1:
            row = self.rng.randrange(num_rows)
            if row not in self.model.parent:
                for group in slots.values():
                    group[row] = -1
        return slots

    def write_layers(
        self,
        num_rows: int,
        slots: dict[int, list[int]],
        epoch: int,
        bad: bool,
        skipped: str | None,
    ) -> None:
        rng = self.rng
        jobs = []
        for layer in self.layers:
            if layer == skipped:
                continue
            order = list(range(num_rows))
            if rng.random() < 0.6:
                jobs.append((layer, None))
                continue
            rng.shuffle(order)
            while order:
                take = rng.randint(1, len(order))
                jobs.append((layer, order[:take]))
                order = order[take:]
        if rng.random() < 0.3:  # some rows once more, with other bytes
            jobs.append(
                (rng.choice(self.layers), rng.sample(range(num_rows), rng.randint(1, num_rows)))
            )
        if rng.random() < 0.5:
            rng.shuffle(jobs)
        for number, (layer, rows) in enumerate(jobs):
            listed = range(num_rows) if rows is None else rows
            key, value, keys, values = self.rows_tensor(len(listed))
            row_slots = [slots[self.model.groups[layer]][row] for row in listed]
            outcome = self.interceptor.write(
                layer,
                key,
                value,
                torch.tensor(row_slots),
                rows=rows,
                epoch=epoch if rng.random() < 0.5 else None,
            )
            fresh = sum(
                1
                for row in listed
                if self.model.staging
                and row in self.model.parent
                and (layer, row) not in self.model.staged
            )
            assert outcome.action == ("stage" if self.model.staging else "direct"), outcome
            assert outcome.staged_rows == fresh, outcome
            self.model.write(layer, list(listed), keys, values, row_slots)
            if bad and number == 0:
                self.bad_write(num_rows, slots)

    def walk(self, query_lens: list[int], num_drafts: list[int]) -> list[list[int]]:
        """An accepted path of each request, as rows of the batch."""
        children: dict[int, list[int]] = {}
        for row, parent in self.model.parent.items():
            children.setdefault(parent, []).append(row)
        accepted = []
        for b, first in enumerate(self.model.first_row):
            at, path = first + query_lens[b] - num_drafts[b] - 1, []
            while at in children and self.rng.random() < 0.75:
                at = self.rng.choice(children[at])
                path.append(at)
            accepted.append(path)
        return accepted

    def commit_round(self, query_lens: list[int], num_drafts: list[int], bad: bool):
        rng = self.rng
        accepted = self.walk(query_lens, num_drafts)
        emitted = [len(path) for path in accepted]
        given = None
        if rng.random() < 0.5:  # destinations of their own: any slots, as long as none repeats
            given = {}
            for group, total in self.slots_of_group.items():
                free = rng.sample(range(total), sum(emitted))
                given[group] = [[free.pop() for _ in path] for path in accepted]
        while True:
            chunk = (
                [rng.randint(0, len(path)) for path in accepted]
                if rng.random() < 0.3
                else [len(p) for p in accepted]
            )
            last = chunk == [len(path) for path in accepted]
            part = [path[:n] for path, n in zip(accepted, chunk, strict=True)]
            part_slots = None
            if given is not None:
                part_slots = {
                    g: [row[:n] for row, n in zip(rows, chunk, strict=True)]
                    for g, rows in given.items()
                }
            if bad:
                self.bad_commit(part, part_slots)
                bad = False
            receipt = self.commit_chunk(part, part_slots, last)
            self.model.commit(part, part_slots)
            assert receipt.ok, receipt.problem
            assert receipt.committed_tokens == sum(chunk)
            self.tally["commits"] += 1
            self.tally["explicit destinations"] += given is not None
            self.tally["chunks"] += not last
            accepted = [path[n:] for path, n in zip(accepted, chunk, strict=True)]
            if given is not None:
                given = {
                    g: [row[n:] for row, n in zip(rows, chunk, strict=True)]
                    for g, rows in given.items()
                }
            if last:
                return receipt, emitted
            if rng.random() < 0.1:  # what is committed stays
                self.interceptor.abort()
                self.tally["aborts after a chunk"] += 1
                return None, [n - len(rest) for n, rest in zip(emitted, accepted, strict=True)]

    def commit_refused(self, query_lens: list[int], num_drafts: list[int]):
        """The commit of a round that cannot be: its receipt says why, and nothing changes."""
        receipt = self.commit_chunk(self.walk(query_lens, num_drafts), None, last=True)
        assert not receipt.ok
        assert receipt.degraded == receipt.verdict.error
        assert receipt.degraded in self.refusing
        assert receipt.committed_tokens == 0
        self.tally[f"fallback: {receipt.degraded}"] += 1
        return receipt

    # ---- what is left to the engine ----

    def expect_bypass(self, reason: str, **call) -> None:
        outcome = self.interceptor.write(**call)
        assert (outcome.action, outcome.reason) == ("bypass", reason), outcome
        self.check_bytes(reason)
        self.tally[f"fallback: {reason}"] += 1

    def fall_back(self, num_rows: int, slots: dict[int, list[int]], epoch: int) -> None:
        rng, layer = self.rng, self.rng.choice(self.layers)
        group = self.model.groups[layer]
        key, value, _, _ = self.rows_tensor(num_rows)
        mapping = torch.tensor(slots[group])
        call = {"layer": layer, "key": key, "value": value, "slot_mapping": mapping}
        kind = rng.randrange(4)
        if kind == 0:
            self.expect_bypass("stale_round", **call, epoch=epoch - 1)
        elif kind == 1:
            self.expect_bypass("fake_tensor", **(call | {"key": key.to("meta")}))
        elif kind == 2:
            self.expect_bypass("unbound_layer", **(call | {"layer": "nobody"}))
        else:
            known = [row for row in self.model.parent if (group, row) in self.model.slot_of]
            if not known:
                return
            row = rng.choice(known)
            other = (self.model.slot_of[group, row] + 1) % self.slots_of_group[group]
            one = {"key": key[:1], "value": value[:1], "slot_mapping": torch.tensor([other])}
            self.expect_bypass("slot_mismatch", **(call | one), rows=[row])
            self.refusing.add("slot_mismatch")

    def play_disabled_round(self) -> None:
        """Switched off, every write is left to the engine, and this engine does not write."""
        query_lens, num_drafts, parents = self.plan()
        self.interceptor.set_enabled(False)
        decision = self.interceptor.begin(nwor_specpv.RoundPlan(query_lens, num_drafts, parents))
        assert (decision.stage, decision.reason) == (False, "disabled")
        for layer in self.layers:
            key, value, _, _ = self.rows_tensor(sum(query_lens))
            slots = torch.arange(sum(query_lens))
            self.expect_bypass("disabled", layer=layer, key=key, value=value, slot_mapping=slots)
        self.interceptor.abort()
        self.interceptor.set_enabled(True)
        self.model.begin(query_lens, num_drafts, parents, staging=False)
        self.model.end(aborted=True)

    def commit_arguments(self, part, part_slots) -> dict:
        rng = self.rng
        depth = max(map(len, part)) + rng.choice((0, 0, 1, 3))
        junk = rng.choice((-1, -1, 99))  # what stands behind a count is nobody's business
        by_request = rng.random() < 0.5
        path, dest = [], {g: [] for g in part_slots} if part_slots is not None else None
        for b, rows in enumerate(part):
            base = self.model.first_row[b] if by_request else 0
            path.append([row - base for row in rows] + [junk] * (depth - len(rows)))
            for group in dest or ():
                dest[group].append(part_slots[group][b] + [junk] * (depth - len(rows)))
        shape = (len(part), depth)
        return {
            "path": torch.tensor(path, dtype=torch.int32).view(shape),
            "counts": torch.tensor([len(rows) for rows in part], dtype=torch.int32),
            "slots": None
            if dest is None
            else [torch.tensor(dest[g], dtype=torch.int64).view(shape) for g in sorted(dest)],
            "rows": "request" if by_request else "batch",
        }

    def commit_chunk(self, part, part_slots, last: bool):
        arguments = self.commit_arguments(part, part_slots)
        if arguments["slots"] is not None and self.num_groups == 1 and self.rng.random() < 0.5:
            arguments["slots"] = arguments["slots"][0]
        return self.interceptor.commit(**arguments, last=last)
