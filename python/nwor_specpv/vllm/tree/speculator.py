"""An EAGLE head that drafts trees, on model runner V2.

    --speculative-config '{"method": "eagle3", "model": HEAD}'
    --additional-config '{"nwor_specpv": {"draft_tree": 16}}'

vLLM's own speculator has the head take in the tokens that a step has emitted, as it does for
chains. Then the head grows a tree below the last of them, and its rows are the drafts of the next
step. Nothing is read on the host, so asynchronous scheduling stays on.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from nwor_specpv import likeliest_tokens
from nwor_specpv.vllm.engine import engine_of
from nwor_specpv.vllm.head_scores import own_scores
from nwor_specpv.vllm.hooks.graph_lengths import offer_larger_graphs

from .growth import grow
from .head import TreeHead
from .shape import TreeShape, shape_of


class TreeSpeculator(EagleSpeculator):
    """vLLM's EAGLE speculator, which drafts trees. Thread-safety: none."""

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        self._engine = engine_of(self.vllm_config)
        self._trees = self._engine.trees
        shape = (self.max_num_reqs, self._trees.shape.width)
        # Of fixed address: vLLM's own graph of the head's first run fills them.
        self._first_tokens = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._first_scores = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self._drafted = self._trees.room()
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # by rows and requests
        self._offered = not self._engine.draft_lengths  # graphs of the target's

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        self._graphs.clear()  # tried on caches that are gone
        if self._engine.draft_lengths:
            offer_larger_graphs(self.prefill_cudagraph_manager)

    def capture(self) -> None:
        with self._one_step():
            super().capture()
        manager = self.prefill_cudagraph_manager
        if manager is not None:
            full = ((desc.uniform_token_count, desc.num_reqs) for desc in manager.graphs)
            self._capture_growth({(rows, size) for rows, size in full if rows and rows > 1})

    def _capture_growth(self, shapes: Collection[tuple[int, int]]) -> None:
        """One graph of all levels for each number of rows and requests, the largest first."""
        # What vLLM's trial runs have left may be no numbers.
        self.input_buffers.positions.fill_(-1)
        for part in (self.hidden_states, self._first_scores, self._first_tokens):
            part.zero_()
        with graph_capture(device=self.device):
            for rows, size in sorted(shapes, reverse=True):
                run = functools.partial(self._grow, shape_of(rows), size)
                run()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, self.prefill_cudagraph_manager.pool):
                    run()
                self._graphs[rows, size] = graph

    def sample_draft(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """vLLM wants the likeliest token after each request's last one; trees begin with more."""
        tokens, scores = self._best(hidden_states, self._trees.shape.width)
        self._first_tokens[: tokens.shape[0]] = tokens
        self._first_scores[: tokens.shape[0]] = scores
        return tokens[:, 0]

    def _best(self, outputs: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = outputs.flatten(0, -2)
        own = own_scores(self, rows)
        logits = self.model.compute_logits(rows) if own is None else own[0]
        tokens, log_probs = likeliest_tokens(logits.unflatten(0, outputs.shape[:-1]), width)
        return (tokens if own is None else tokens + own[1][tokens]), log_probs

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        *more: Any,
        **others: Any,
    ) -> torch.Tensor:
        real = not others.get("dummy_run") and not others.get("is_profile")
        others.pop("num_speculative_tokens", None)  # `_one_step` says how many vLLM's part drafts
        if real:
            self._offer_graphs()
            order = self._trees.restore(input_batch.input_ids, input_batch.positions)
            if order is not None and aux_hidden_states:  # all that EAGLE3 reads
                aux_hidden_states = [one[order] for one in aux_hidden_states]
            elif order is not None:
                last_hidden_states = last_hidden_states[order]
        with self._one_step():
            super().propose(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                *more,
                **others,
            )
        count, wanted = input_batch.num_reqs, self._engine.num_drafts
        if not real or not wanted:  # a plain step follows: the head has taken in this one's tokens
            return self.draft_tokens[:count]
        shape = shape_of(1 + wanted)  # fewer rows than the most where their number is chosen
        sizes = [size for rows, size in self._graphs if rows == shape.rows and size >= count]
        if sizes:
            self._graphs[shape.rows, min(sizes)].replay()
        else:
            self._grow(shape, count)
        return self._trees.put(input_batch.idx_mapping, self._drafted)

    def _offer_graphs(self) -> None:
        """Once, as soon as the runner is known: those of the target's manager."""
        if not self._offered:
            self._offered = True
            offer_larger_graphs(getattr(self._engine.runner, "cudagraph_manager", None))

    def _grow(self, shape: TreeShape, count: int) -> None:
        """Grows trees of the first requests that vLLM's part of the proposal was of. What it reads
        and writes has a fixed address."""
        chained = self._trees.chains[self.idx_mapping[:count].long()]
        grown = grow(
            shape,
            self._first_tokens[:count, : shape.width],
            self._first_scores[:count, : shape.width],
            self.hidden_states[:count],
            chained,
            TreeHead(self, count).run,
            functools.partial(self._best, width=shape.width),
        )
        self._trees.drafted(grown.tree, grown.chain, chained).copy_to(self._drafted)

    @contextlib.contextmanager
    def _one_step(self) -> Iterator[None]:
        """vLLM's part drafts one token: the rest is ours."""
        steps, self.num_speculative_steps = self.num_speculative_steps, 1
        try:
            yield
        finally:
            self.num_speculative_steps = steps
