"""One round: the rows of a batch as tensors, the forward pass, the commit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nwor_specpv import NworError, RoundPlan, Tree, tree_from_parents

from .layers.attention import Step
from .packed_tensors import copy_to_device
from .request import Part
from .runner import ModelRunner
from .views.views import Views


class Round:
    """begin -> run -> commit, over the parts of some requests; `abort` when something raises."""

    def __init__(
        self,
        runner: ModelRunner,
        parts: list[Part],
        feature_layers: Sequence[int] = (),
        *,
        graphs: bool = True,
    ) -> None:
        """`graphs`: the pass may be a captured one, where the runner has such."""
        self._runner, self._cache, self._graphs = runner, runner.cache, graphs
        self._feature_layers = feature_layers
        self.parts = parts
        # The round's requests, as indices of parts; None: a place of the views without rows.
        self._order: list[int | None] = [*range(len(parts))]
        self._partial: Views | None = None
        self._slots: list[torch.Tensor] = []  # of each part's rows up to its root
        self.starts = [0]
        for part in parts:
            self.starts.append(self.starts[-1] + part.num_rows)
        self.logits: torch.Tensor | None = None
        self.features: torch.Tensor | None = None
        self.violations: list[str] = []

    def run(self, partial: Views | None, places: int) -> None:
        """The forward pass. `places`: requests of the batch of `partial`, by their index."""
        cache = self._cache
        if partial is not None:
            self._partial, self._order = partial, [None] * places
            for index, part in enumerate(self.parts):
                self._order[part.request.index] = index
        self._slots = [self._place(part) for part in self.parts]  # may copy a shared page
        if cache.checker is not None:
            cache.checker.snapshot()
        step = self._step()
        plan = self._plan()
        fixed = self._runner.prepare(step, self._feature_layers) if self._graphs else None
        decision = cache.interceptor.begin(plan)
        if any(plan.num_drafts) and not decision.stage:
            cache.interceptor.abort()
            raise NworError(
                f"staging: got {plan.query_lens} rows, expected room for them ({decision.reason}); "
                "lower tree.rows, or raise max_staging_bytes if the reason is capacity"
            )
        try:
            self.logits, self.features = self._runner.run(step, self._feature_layers, fixed)
        except BaseException:
            cache.interceptor.abort()
            raise
        if cache.checker is not None:
            self.violations += map(repr, cache.checker.verify_staged())

    def _plan(self) -> RoundPlan:
        lens, drafts, parents = [], [], []
        for index in self._order:
            part = None if index is None else self.parts[index]
            lens.append(0 if part is None else part.num_rows)
            drafts.append(0 if part is None else len(part.tokens) - 1)
            parents.append([] if part is None else [len(part.fed) + p for p in part.parents[1:]])
        return RoundPlan(lens, drafts, [] if all(p.is_chain for p in self.parts) else parents)

    def _place(self, part: Part) -> torch.Tensor:
        """Slots of the rows that go to the cache: those before the root, and the root."""
        key, last = part.request.key, part.prefix_len + len(part.fed) + 1
        missing = last - self._cache.allocator.length(key)
        if missing > 0:
            self._cache.extend(key, missing)
        return self._cache.allocator.slots(key, part.prefix_len, last)

    def _step(self) -> Step:
        """On the host, but for the block table."""
        cache, parts, partial = self._cache, self.parts, self._partial
        tokens, positions, wanted, bounds, prefixes, spans = [], [], [], [0], [], []
        mapping = torch.full((self.starts[-1],), -1, dtype=torch.int64)
        for index in self._order:
            begin = bounds[-1]
            if index is None:
                bounds.append(begin)
                prefixes.append(0)
                spans.append([begin, begin])
                continue
            part, own = parts[index], self._slots[index]
            assert self.starts[index] == begin
            mapping[begin : begin + len(own)] = own
            root = part.prefix_len + len(part.fed)
            depths = [0]
            for parent in part.parents[1:]:
                depths.append(depths[parent] + 1)
            tokens += part.fed + part.tokens
            positions += range(part.prefix_len, root)
            positions += (root + depth for depth in depths)
            first = begin if part.want_fed_logits else begin + len(part.fed)
            wanted += range(first, begin + part.num_rows)
            bounds.append(begin + part.num_rows)
            prefixes.append(part.prefix_len)
            spans.append([begin + len(part.fed), bounds[-1]])
        keys = [None if index is None else parts[index].request.key for index in self._order]
        return Step(
            tokens=torch.tensor(tokens),
            positions=torch.tensor(positions),
            slots=mapping,
            block_table=cache.block_table(keys),
            prefix_lens=torch.tensor(prefixes, dtype=torch.int32),
            query_start=torch.tensor(bounds, dtype=torch.int32),
            tree_mask=self._mask(),
            max_rows=max(part.num_rows for part in parts),
            logit_rows=None if len(wanted) == len(tokens) else torch.tensor(wanted),
            partial=partial,
            refreshing=any(
                part.decision is not None and part.decision.kind == "full_refresh" for part in parts
            ),
            tree_rows=None if partial is None else torch.tensor(spans, dtype=torch.int32),
        )

    def _mask(self) -> torch.Tensor | None:
        if all(part.is_chain for part in self.parts):
            return None
        rows = []
        for part in self.parts:
            fed = len(part.fed)
            rows.append([*range(-1, fed), *(fed + parent for parent in part.parents[1:])])
        mask = _tree(rows, torch.device("cpu")).mask
        if len(rows) == 1:
            return mask[0]
        return torch.cat([own[: len(row)] for own, row in zip(mask, rows, strict=True)])

    # ---- what came out ---------------------------------------------------------------------------

    def trees(self) -> Tree:
        """The trees alone, padded to the largest, for acceptance."""
        return _tree(
            [part.parents for part in self.parts],
            self._runner.device,
            [part.tokens for part in self.parts],
            [part.prefix_len + len(part.fed) for part in self.parts],
        )

    def tree_logits(self) -> torch.Tensor:
        """[B, R, V], padded with rows that nobody looks at."""
        spans = self.logit_spans()
        if len(spans) == 1:
            return self.logits[spans[0][1] :][None]
        rows = max(end - root for _, root, end in spans)
        if all(first == root and end - root == rows for first, root, end in spans):
            return self.logits.unflatten(0, (len(spans), rows))
        index = [[min(root + i, end - 1) for i in range(rows)] for _, root, end in spans]
        return self.logits[torch.tensor(index, device=self.logits.device)]

    def fed_logits(self, part_idx: int) -> torch.Tensor:
        """[rows before the root, V] of a part that wanted them."""
        first, root, _ = self.logit_spans()[part_idx]
        return self.logits[first:root]

    def logit_spans(self) -> list[tuple[int, int, int]]:
        """(first, root, end) of each part among the rows that have logits."""
        spans, at = [], 0
        for part in self.parts:
            fed = len(part.fed) if part.want_fed_logits else 0
            spans.append((at, at + fed, at + fed + len(part.tokens)))
            at = spans[-1][2]
        return spans

    # ---- commit ----------------------------------------------------------------------------------

    def commit(self, paths: list[list[int]]) -> None:
        """Caches the accepted rows of each part's tree, in every layer or in none."""
        cache, places, depth = self._cache, len(self._order), max(1, *map(len, paths))
        rows = torch.full((places, depth), -1, dtype=torch.int32)
        slots = torch.full((places, depth), -1, dtype=torch.int64)
        emitted, roots = [0] * places, [-1] * places
        for place, index in enumerate(self._order):
            if index is None:
                continue
            part, path = self.parts[index], paths[index]
            emitted[place], roots[place] = len(path), int(self._slots[index][0])
            if path:
                fed = len(part.fed)
                rows[place, : len(path)] = torch.tensor([fed + row for row in path])
                slots[place, : len(path)] = cache.extend(part.request.key, len(path))
        given = {"rows": rows, "counts": torch.tensor(emitted, dtype=torch.int32), "slots": slots}
        there = copy_to_device(given | {"roots": torch.tensor(roots)}, self._runner.device)
        tail = None if self._partial is None else self._partial.tail(there["roots"])
        receipt = cache.interceptor.commit(
            there["rows"], there["counts"], there["slots"], rows="request", tail=tail
        )
        if not receipt.ok:
            raise NworError(
                f"commit: got {receipt.verdict.error} {receipt.problem}, expected ok".rstrip()
            )
        if cache.checker is not None:
            self.violations += map(repr, cache.checker.verify(receipt, emitted))

    def abort(self) -> None:
        if self._cache.interceptor.stats()["round_open"]:
            self._cache.interceptor.abort()


def _tree(
    parents: list[list[int]],
    device: torch.device,
    tokens: list[list[int]] | None = None,
    prefix_lens: list[int] | None = None,
) -> Tree:
    rows = max(map(len, parents))

    def padded(lists: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([one + [0] * (rows - len(one)) for one in lists], dtype=dtype)

    there = copy_to_device(
        {
            "parents": padded(parents, torch.int32),
            "prefix_lens": torch.tensor(prefix_lens or [0] * len(parents), dtype=torch.int32),
            "num_rows": torch.tensor([len(one) for one in parents], dtype=torch.int32),
        }
        | ({} if tokens is None else {"tokens": padded(tokens, torch.int64)}),
        device,
    )
    return tree_from_parents(
        there["parents"], there["prefix_lens"], there.get("tokens"), num_rows=there["num_rows"]
    )
