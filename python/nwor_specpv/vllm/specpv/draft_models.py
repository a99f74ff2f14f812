"""The two models that draft, as vLLM has them: the target over views, and the EAGLE head.

Both run on rows of ours, inside captured graphs: whatever they touch keeps its address.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from nwor_specpv.errors import NworError
from nwor_specpv.vllm import versions
from nwor_specpv.vllm.head_scores import own_scores

from .chain import Chains, slots_of, window_of
from .draft_sampling import Drawing, draw
from .lengths import Lengths
from .partial_pass import PartialPass
from .target import TargetModel

_HEAD_TOKENS = 1024  # that a head sees beside partial passes, at most


class Drafting(Drawing, Protocol):
    """What both models use of vLLM's speculator and of ours, which extends it."""

    # vLLM's own.
    vllm_config: Any
    device: torch.device
    model: Any  # the head
    max_model_len: int
    attn_groups: Any
    block_tables: Any
    draft_attn_layer_names: set[str]
    draft_tokens: torch.Tensor  # [B, limit]
    hidden_states: torch.Tensor
    idx_mapping: torch.Tensor  # [B]: where a request's state lies

    # Ours.
    draws: bool  # whether a request of this proposal is sampled, and its drafts are drawn
    lengths: Lengths

    def group_of(self, layer: str) -> int:
        """The cache group of a layer."""


def _column(columns: torch.Tensor | None, number: int) -> torch.Tensor | None:
    return None if columns is None else columns[:, number]


class SampledTarget:
    """vLLM's target over views, and its tokens: the likeliest, or drawn as requests ask for."""

    def __init__(self, speculator: Drafting, target: TargetModel) -> None:
        self._speculator, self._model = speculator, target

    def run(
        self,
        passed: PartialPass,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        columns: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self._speculator
        hidden, wanted = self._model.forward(passed, tokens, positions)
        logits = self._model.logits(hidden)
        if wanted is not None:
            combined = spec.model.combine_hidden_states(torch.cat(wanted, dim=-1))
        else:
            combined = hidden
        if not spec.draws:
            return logits.argmax(dim=-1), combined
        assert spec.draft_logits is not None
        if logits.shape[-1] != spec.draft_logits.shape[-1]:
            raise NworError(
                f"the target has {logits.shape[-1]} logits and the head "
                f"{spec.draft_logits.shape[-1]}, so drafts cannot be drawn; use "
                "specpv_draft_sampling 'greedy'"
            )
        requests = spec.idx_mapping[: passed.num_requests]
        said = draw(spec, logits, requests, positions, columns)
        return said.clamp(0, logits.shape[-1] - 1), combined


@dataclass(frozen=True)
class Stretch:
    """Positions of the text from `start` on that one turn of the head may reach."""

    start: torch.Tensor  # [B] int64
    slots: torch.Tensor  # [B, positions] int64 in the head's own cache, -1: none reserved
    table: torch.Tensor  # [B, pages] int32: the pages that the head sees
    before: torch.Tensor  # [B] tokens of the text before those pages


class EagleHead:
    """The head on rows of ours, over buffers that keep their address."""

    def __init__(self, speculator: Drafting, chains: Chains) -> None:
        self._speculator, self._chains = speculator, chains
        self._layers = sorted(speculator.draft_attn_layer_names)
        self._group = speculator.group_of(self._layers[0])
        self._page_size = versions.adapter.page_size(speculator.block_tables, self._group)
        batch, device = chains.prefix.shape[0], speculator.device
        self._starts = {
            rows: torch.arange(batch + 1, dtype=torch.int32) * rows for rows in (1, chains.rows)
        }
        self._starts_device = {rows: start.to(device) for rows, start in self._starts.items()}
        # A turn takes up a pass' rows, and then guesses from the last right one on.
        self._reach = 2 * chains.rows
        self._steps = torch.arange(self._reach, device=device)
        # Beside partial passes it sees the latest tokens only: it would read the whole of its
        # cache for every guess otherwise.
        view = min(speculator.lengths.view_tokens, _HEAD_TOKENS) + chains.limit + chains.rows
        self._pages = 1 - (-view // self._page_size)

    def go_on(self, count: int) -> torch.Tensor:
        spec = self._speculator
        stretch = self._stretch(count, self._chains.prefix[:count])
        at = self._steps[:1].expand(count, 1)
        return self._draft(count, spec.draft_tokens[:count, 0], spec.hidden_states[:count],
                           stretch, at, self._columns(count, last=False))  # fmt: skip

    def take_up(
        self, chains: Chains, count: int, hidden: torch.Tensor, *, last: bool
    ) -> torch.Tensor:
        rows, accepted = chains.rows, chains.accepted[:count]
        stretch = self._stretch(count, chains.starts[:count])
        at = self._steps[:rows].expand(count, rows)
        said = chains.said[:count].flatten()
        outputs, states = self._run(count, said, hidden[: count * rows], stretch, at)
        row = self._starts_device[rows][:count] + accepted
        columns = self._columns(count, last=last)
        first = self._sample(outputs[row], stretch.start + accepted, _column(columns, 0))
        after = accepted[:, None] + 1
        return self._draft(count, first, states[row], stretch, after, columns)

    def tell(self, chains: Chains, count: int) -> None:
        """Its guesses were drawn, and their logits are told."""

    def _columns(self, count: int, *, last: bool) -> torch.Tensor | None:
        """Which drafts of the full step its guesses are, None: no drafts of it. Where noise depends
        on that, a guess has the noise of the pass that judges it, which then tells its own logits.
        """
        tells = last or versions.adapter.noise_by_column
        return self._chains.columns(count) if tells else None

    def _stretch(self, count: int, start: torch.Tensor) -> Stretch:
        spec, chains = self._speculator, self._chains
        table = spec.block_tables.input_block_tables[self._group][:count]
        ends = torch.where(chains.active[:count], chains.prefix[:count] + chains.limit, 0)
        ends = ends.clamp(max=spec.max_model_len)
        start = start.long()
        positions = start[:, None] + self._steps
        slots = slots_of(positions, ends, table, self._page_size)
        most = (start + self._reach).clamp(max=spec.max_model_len)
        seen, tokens = window_of(table, most, self._page_size, self._pages)
        return Stretch(start, slots, seen, most - tokens)

    def _draft(
        self,
        count: int,
        first: torch.Tensor,
        hidden: torch.Tensor,
        stretch: Stretch,
        at: torch.Tensor,
        columns: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[count, guesses]: `first`, whose entry is at place `at` [count, 1], and what follows.

        `columns` [count, rows]: which drafts of the full step they are, None: no drafts of it.
        """
        guesses = [first]
        for number in range(1, self._chains.rows - 1):
            outputs, hidden = self._run(count, guesses[-1], hidden, stretch, at)
            column = _column(columns, number)
            guesses.append(self._sample(outputs, stretch.start + at[:, 0], column))
            if number < self._chains.rows - 2:
                at = at + 1
        return torch.stack(guesses, dim=1)

    def _run(
        self,
        count: int,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        stretch: Stretch,
        at: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The head over rows at places `at` [count, rows] of the stretch, which follow one another;
        K/V goes to its own cache, as far as vLLM has reserved slots."""
        spec, rows = self._speculator, at.shape[1]
        positions = (stretch.start[:, None] + at).clamp(max=spec.max_model_len - 1)
        slots = stretch.slots.gather(1, at.long()).flatten()
        lens = (positions[:, 0] + rows).clamp(max=spec.max_model_len) - stretch.before
        common = CommonAttentionMetadata(
            query_start_loc=self._starts_device[rows][: count + 1],
            query_start_loc_cpu=self._starts[rows][: count + 1],
            seq_lens=lens.to(torch.int32),
            max_seq_len=min(spec.max_model_len, self._pages * self._page_size),
            num_reqs=count,
            num_actual_tokens=count * rows,
            max_query_len=rows,
            block_table_tensor=stretch.table,
            slot_mapping=slots,
        )
        builder = spec.attn_groups[self._group][0].get_metadata_builder(0)
        # Without a schedule made in advance: it would be one of the lengths at capture.
        metadata = builder.build(0, common, fast_build=True)
        with set_forward_context(
            dict.fromkeys(self._layers, metadata),
            spec.vllm_config,
            num_tokens=count * rows,
            slot_mapping=dict.fromkeys(self._layers, slots),
        ):
            found = spec.model(
                input_ids=tokens.to(torch.int32),
                positions=positions.flatten(),
                hidden_states=hidden,
                inputs_embeds=None,
            )
        return found if isinstance(found, tuple) else (found, found)

    def _sample(
        self, hidden: torch.Tensor, positions: torch.Tensor, column: torch.Tensor | None
    ) -> torch.Tensor:
        spec = self._speculator
        if not spec.draws:
            return self._likeliest(hidden)
        requests = spec.idx_mapping[: hidden.shape[0]]
        logits = spec.model.compute_logits(hidden)
        return draw(spec, logits, requests, positions.long() + 1, column)

    def _likeliest(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head's best guesses."""
        own = own_scores(self._speculator, hidden)
        if own is None:
            return versions.adapter.likeliest(self._speculator, hidden)
        best = own[0].argmax(dim=-1)
        return best + own[1][best]
