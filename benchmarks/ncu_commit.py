"""DRAM and L2 traffic of both write schemes, measured by Nsight Compute over whole steps.

    drive PLAN          runs every scheme at every acceptance, each inside a profiler range
    table PLAN CSV      puts Nsight's raw page beside the plan: a table, and JSON with --json FILE

`ncu_commit.sh` runs both. A range holds many rounds and ends with a read of more than the L2 holds,
so that what a round leaves dirty in L2 is written back inside it.

Schemes: `engine` writes every row of every round to the paged cache, rejected or not; `nwor` stages
draft rows and commits the accepted ones; `nwor, cache only` is the part of `nwor` whose target is
the paged cache (root rows and commit), with the rows staged beforehand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ncu_ranges import FLUSH_BYTES, read_results, run_command

LAYERS, HEADS, DIM, PAGE_SIZE = 32, 8, 128, 16
REQUESTS, DRAFTS, ROUNDS = 16, 10, 20
ACCEPTANCE = (0, 30, 70, 100)  # percent; ten drafts make each a whole number


class Step:
    """Tensors of all rounds, made before anything is measured."""

    def __init__(self) -> None:
        import torch

        import nwor_specpv

        self.torch, self.nwor = torch, nwor_specpv
        torch.manual_seed(0)
        rows = REQUESTS * (1 + DRAFTS)
        slots_per_request = -(-ROUNDS * (1 + DRAFTS) // PAGE_SIZE) * PAGE_SIZE
        pages = REQUESTS * slots_per_request // PAGE_SIZE
        options = {"device": "cuda", "dtype": torch.bfloat16}
        memory = [torch.zeros(pages, HEADS, PAGE_SIZE, 2 * DIM, **options) for _ in range(LAYERS)]
        views = [nwor_specpv.cache_views(cache, "packed") for cache in memory]
        self.keys, self.values = [key for key, _ in views], [value for _, value in views]
        # The step's K/V of each layer, as its projections left it.
        self.rows = torch.randn(2, LAYERS, rows, HEADS, DIM, **options)
        self.staged = torch.zeros(2, LAYERS, REQUESTS * DRAFTS, HEADS, DIM, **options)
        self.pages_of = torch.randperm(pages).view(REQUESTS, -1)
        self.flush = torch.ones(FLUSH_BYTES // 4, device="cuda")
        self.status = torch.zeros(8, dtype=torch.int64, device="cuda")
        draft = torch.arange(rows) % (1 + DRAFTS)
        staging_row = torch.arange(rows) // (1 + DRAFTS) * DRAFTS + draft - 1
        is_draft = draft > 0
        self.stage_rows = torch.where(is_draft, staging_row, -1).int().cuda()
        self.not_staged = torch.full_like(self.stage_rows, -1)
        path = torch.arange(REQUESTS * DRAFTS, dtype=torch.int32).view(REQUESTS, DRAFTS)
        self.path = path.cuda()
        self.is_draft = is_draft.cuda()

    def round_slots(self, accepted: int):
        """Per round the slots of all rows [T]: each round starts after what the last one kept."""
        torch = self.torch
        for turn in range(ROUNDS):
            positions = turn * (1 + accepted) + torch.arange(1 + DRAFTS)
            pages = self.pages_of[:, positions // PAGE_SIZE]
            yield (pages * PAGE_SIZE + positions % PAGE_SIZE).cuda()  # [B, 1 + drafts]

    def engine(self, accepted: int) -> Callable[[], None]:
        slots = [one.flatten() for one in self.round_slots(accepted)]

        def run() -> None:
            for one in slots:
                for layer in range(LAYERS):
                    self.write_rows(layer, one, self.not_staged)

        return run

    def nwor_scheme(self, accepted: int, with_staging: bool) -> Callable[[], None]:
        torch = self.torch
        counts = torch.full((REQUESTS,), accepted, dtype=torch.int32, device="cuda")
        rounds = []
        for one in self.round_slots(accepted):
            root_only = torch.where(self.is_draft, -1, one.flatten())
            drafts = torch.where(torch.arange(DRAFTS, device="cuda") < accepted, one[:, 1:], -1)
            rounds.append((root_only, drafts.contiguous()))

        def run() -> None:
            for root_only, drafts in rounds:
                for layer in range(LAYERS):
                    rows = self.stage_rows if with_staging else self.not_staged
                    self.write_rows(layer, root_only, rows)
                self.nwor.commit(
                    self.staged[0],
                    self.staged[1],
                    self.keys,
                    self.values,
                    self.path,
                    counts,
                    drafts,
                    self.status,
                )

        return run

    def write_rows(self, layer: int, slots, stage_rows) -> None:
        self.nwor.write_kv(
            self.rows[0, layer],
            self.rows[1, layer],
            self.keys[layer],
            self.values[layer],
            slots,
            stage_rows,
            self.staged[0, layer],
            self.staged[1, layer],
            exclusive=True,
        )

    def evict(self) -> None:
        self.flush.sum()


def ranges(step: Step) -> Iterator[tuple[str, int, Callable[[], None]]]:
    for percent in ACCEPTANCE:
        accepted = DRAFTS * percent // 100
        yield "engine", percent, step.engine(accepted)
        yield "nwor", percent, step.nwor_scheme(accepted, with_staging=True)
        yield "nwor, cache only", percent, step.nwor_scheme(accepted, with_staging=False)


def drive(plan_path: Path) -> int:
    import torch

    step = Step()
    plan = []
    for scheme, percent, run in ranges(step):
        run()  # modules loaded, caches of the allocator filled
        step.evict()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        run()
        step.evict()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
        code = step.status[0].item()
        if code != 0:
            raise RuntimeError(f"{scheme} at {percent} %: commit status {step.status.tolist()}")
        plan.append({"scheme": scheme, "acceptance": percent})
    row_bytes = 2 * LAYERS * HEADS * DIM * 2
    plan_path.write_text(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "rounds": ROUNDS,
                "requests": REQUESTS,
                "drafts": DRAFTS,
                "rows_per_round": REQUESTS * (1 + DRAFTS),
                "bytes_per_row": row_bytes,
                "flush_read_bytes": FLUSH_BYTES,
                "ranges": plan,
            },
            indent=2,
        )
    )
    return 0


def table(plan_path: Path, csv_path: Path, json_path: Path | None) -> int:
    plan, measured = read_results(plan_path, csv_path)
    results = []
    for one, values in zip(plan["ranges"], measured, strict=True):
        per_round = {name: value / plan["rounds"] for name, value in values.items()}
        # The read that ends a range is not the scheme's.
        per_round["dram_read"] -= plan["flush_read_bytes"] / plan["rounds"]
        per_round["l2_read"] -= plan["flush_read_bytes"] / plan["rounds"]
        results.append({**one, "bytes_per_round": per_round})
    print(
        f"{plan['device']} · torch {plan['torch']} · {plan['requests']} requests, 1 + "
        f"{plan['drafts']} rows each, {LAYERS} layers: "
        f"{plan['rows_per_round'] * plan['bytes_per_row'] / 1e6:.1f} MB of K/V per round · mean of "
        f"{plan['rounds']} rounds, MB per round"
    )
    print(f"{'acceptance':>10}  {'scheme':<18}{'L2 write':>10}{'L2 read':>10}", end="")
    print(f"{'DRAM write':>12}{'DRAM read':>11}")
    for one in results:
        mb = {name: value / 1e6 for name, value in one["bytes_per_round"].items()}
        print(f"{one['acceptance']:>8} %  {one['scheme']:<18}{mb['l2_write']:>10.2f}", end="")
        print(f"{mb['l2_read']:>10.2f}{mb['dram_write']:>12.2f}{mb['dram_read']:>11.2f}")
    print(
        "'engine' writes every row to the paged cache. 'nwor' stages drafts and commits what was\n"
        "accepted: its total is the figure to compare for bandwidth. 'nwor, cache only' is that\n"
        "part of it which reaches the paged cache; it is no saving of total bandwidth."
    )
    if json_path is not None:
        json_path.write_text(json.dumps({**plan, "ranges": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(__doc__, drive, table))
