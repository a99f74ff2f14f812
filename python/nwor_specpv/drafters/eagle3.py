"""Drafts with an EAGLE3 head: trees grown a depth at a time, best guesses first.

    drafter = Eagle3Drafter.for_target(model)            # the shipped head of SmolLM2-135M-Instruct

Every request has a small cache: keys and values of the head's one layer. `draft` first adds what
the target has committed. A tree's own entries lie after those and are overwritten by the next
tree. The head reads the last entries only, so drafting costs the same at any context.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from nwor_specpv._C import DraftTree
from nwor_specpv.errors import NworError
from nwor_specpv.ops.tree import tree_from_topk

from .base import Drafter, TreeConfig, check_requests, check_retracted
from .eagle3_head import Eagle3Head, rotate
from .eagle3_products import FEW_ROWS, multiply
from .eagle3_state import Growth, RequestState, new_entries
from .published_head import load_published

SHIPPED = Path(__file__).resolve().parent / "smollm2-135m-instruct-eagle3.safetensors"

# Rows of a tree when neither host nor caller sets them.
_DEFAULT_ROWS = 32
_attention_inputs = torch.ops.nwor_specpv.attention_inputs.default
_layer_output = torch.ops.nwor_specpv.layer_output.default
# Limits of `tree_from_topk`.
_MAX_STEPS, _MAX_CANDIDATES = 32, 4096
# Entries kept beyond the window, for `retract`.
_SPARE_ENTRIES = 512
_MIN_PROBABILITY = 0.05
# On the CPU the rarer half of the vocabulary takes a third of the time and is seldom right.
_CPU_VOCABULARY = 8192


class Eagle3Drafter(Drafter):
    """Drafts for all requests of a host with one head. `dtype` is the type of its products."""

    def __init__(
        self,
        head: Eagle3Head,
        embedding: torch.Tensor,
        output: torch.Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        draft_vocabulary: int | None = None,
        own_tokens: int | None = None,
        own_output: torch.Tensor | None = None,
        min_probability: float | None = None,
    ) -> None:
        """`embedding` and `output` [vocabulary, hidden] are the target's; the same if tied.

        `draft_vocabulary` keeps only that many of the head's tokens, the most frequent ones
        (default: 8192 on the CPU, else all). The latest `own_tokens` (256) rarer tokens of a
        request's own text can be drafted too. Rows to which the head gives less than
        `min_probability` are left out (default: 0.05 on the CPU, where every row costs the target
        time, else 0). `own_output` [draft vocabulary, hidden] is the head's own output matrix. Such
        a head drafts all its tokens, which have no order, and no others.
        """
        shape = head.shape
        for name, matrix in (("embedding", embedding), ("output", output)):
            expected = (shape.target_vocabulary, shape.hidden)
            if matrix is not None and tuple(matrix.shape) != expected:
                raise NworError(
                    f"{name}: got sizes {list(matrix.shape)}, expected {list(expected)}: "
                    "this head was trained for another target"
                )
        size = head.draft_to_target.shape[0]
        device = embedding.device
        if own_output is not None:
            if tuple(own_output.shape) != (size, shape.hidden):
                got = list(own_output.shape)
                raise NworError(f"own_output: got sizes {got}, expected {[size, shape.hidden]}")
            draft_vocabulary, own_tokens = draft_vocabulary or size, own_tokens or 0
        own_tokens = 256 if own_tokens is None else own_tokens
        if draft_vocabulary is None:
            draft_vocabulary = min(size, _CPU_VOCABULARY) if device.type == "cpu" else size
        if not 1 <= draft_vocabulary <= size:
            raise NworError(f"draft_vocabulary: got {draft_vocabulary}, expected 1 to {size}")
        if own_tokens < 0:
            raise NworError(f"own_tokens: got {own_tokens}, expected 0 or more")
        if min_probability is None:
            min_probability = _MIN_PROBABILITY if device.type == "cpu" else 0.0
        if not 0 <= min_probability < 1:
            raise NworError(f"min_probability: got {min_probability}, expected 0 to less than 1")
        self._least = math.log(min_probability) if min_probability > 0 else float("-inf")
        if dtype is None:
            dtype = torch.bfloat16 if device.type == "cpu" else embedding.dtype
        self.feature_layers = shape.feature_layers
        self.vocab_size = shape.target_vocabulary
        self._head = head.to(dtype, device)
        self._head.linear = multiply
        for name, weight in head.weights.items():
            if name.endswith("norm"):
                self._head.weights[name] = weight.to(device, torch.float32)
        own = self._head.weights
        norms = torch.stack([own["token_norm"], own["hidden_norm"]])
        split = [shape.query_size, shape.kv_size, shape.kv_size]
        self._inputs = (norms, shape.norm_epsilon, *own["query_key_value"].split(split))
        gate, up = own["gate_up"].split(shape.intermediate)
        self._outputs = (
            own["attention_output"],
            None,
            own["mlp_norm"],
            shape.norm_epsilon,
            gate,
            up,
            own["down"],
        )
        self._embedding = embedding.detach()
        self._to_target = self._head.draft_to_target[:draft_vocabulary].contiguous()
        self._matrix = (embedding if output is None else output).detach()
        rows = self._matrix[self._to_target] if own_output is None else own_output.to(device)
        self._output = rows[:draft_vocabulary].detach().to(dtype)
        self._common = frozenset(self._to_target.tolist())
        self._max_own = own_tokens
        self._device = device
        self._cos = self._sin = torch.empty(0)
        self._requests: dict[Hashable, RequestState] = {}

    @classmethod
    def for_target(cls, target: Any, weights: Path | str | None = None, **options: Any) -> Drafter:
        """For a Hugging Face model, with the head in the file `weights` (default: the shipped).

        A folder has a published head, as vLLM and SGLang read it.
        """
        path = Path(weights) if weights is not None else SHIPPED
        if path.is_dir():
            return cls._for_published(target, path, **options)
        if not path.is_file():
            raise NworError(
                f"weights: got {path}, which does not exist; expected an EAGLE3 head, as "
                "`python -m nwor_specpv.train.eagle3` makes"
            )
        head = Eagle3Head.load(path)
        embedding = target.get_input_embeddings().weight
        _require_target(path.name, head, embedding)
        output = target.get_output_embeddings().weight
        tied = output.data_ptr() == embedding.data_ptr()
        return cls(head, embedding, None if tied else output, **options)

    @classmethod
    def _for_published(cls, target: Any, folder: Path, **options: Any) -> Drafter:
        text = target.config.get_text_config(decoder=True)
        found = load_published(folder, text.num_hidden_layers)
        embedding, own = target.get_input_embeddings().weight, found.embedding
        _require_target(folder.name, found.head, embedding if own is None else own)
        _require_target(folder.name, found.head, embedding)
        output = target.get_output_embeddings().weight
        return cls(
            found.head,
            embedding if own is None else own.to(embedding.device),
            output,
            own_output=found.output,
            **options,
        )

    # ---- the interface ----

    def begin(self, request: Hashable, prompt_ids: Sequence[int]) -> None:
        if request in self._requests:
            raise NworError(f"request: got {request!r}, which has already begun")
        self._check_tokens("prompt_ids", prompt_ids)
        shape, room = self._head.shape, self._head.shape.window + _SPARE_ENTRIES
        keys = torch.zeros(shape.num_kv_heads, room, shape.head_dim, device=self._device)
        self._requests[request] = RequestState(keys, torch.zeros_like(keys))
        self._note_own(self._requests[request], prompt_ids)  # `observe` brings its rows

    def observe(
        self, request: Hashable, tokens: Sequence[int], features: torch.Tensor | None
    ) -> None:
        state = self._state(request)
        width = len(self.feature_layers) * self._head.shape.hidden
        if features is None or tuple(features.shape) != (len(tokens), width):
            got = None if features is None else list(features.shape)
            raise NworError(f"features: got sizes {got}, expected {[len(tokens), width]}")
        self._check_tokens("tokens", tokens)
        if tokens:
            state.root = int(tokens[-1])
            state.pending.append((features.detach(), list(tokens)))
            self._note_own(state, tokens)

    def retract(self, request: Hashable, num_tokens: int) -> bool:
        state = self._state(request)
        check_retracted(num_tokens)
        waiting = sum(len(tokens) for _, tokens in state.pending)
        if num_tokens > waiting + state.length - state.oldest:
            return False
        if not num_tokens:
            return True
        while num_tokens and state.pending:
            features, tokens = state.pending.pop()
            kept = max(0, len(tokens) - num_tokens)
            num_tokens -= len(tokens) - kept
            if kept:
                state.pending.append((features[:kept], tokens[:kept]))
        # The host observes these rows again, and the root with them.
        state.root = state.pending[-1][1][-1] if state.pending else None
        state.length -= num_tokens
        state.position -= num_tokens
        return True

    def draft(self, requests: Sequence[Hashable], tree: TreeConfig) -> list[DraftTree]:
        check_requests(requests)
        states = [self._state(request) for request in requests]
        for request, state in zip(requests, states, strict=True):
            if state.root is None:
                raise NworError(
                    f"request: got {request!r}, which has observed nothing; call observe first"
                )
        with torch.inference_mode():
            for state in states:
                self._make_room(state, tree.depth * tree.top_k)
            self._take_in(states)
            grown = iter(self._grown([s for s in states if s.hidden is not None], tree))
        return [DraftTree([s.root]) if s.hidden is None else next(grown) for s in states]

    def end(self, request: Hashable) -> None:
        self._requests.pop(request, None)

    # ---- what the target has committed ----

    def _note_own(self, state: RequestState, tokens: Sequence[int]) -> None:
        """Remembers rare tokens of the text, since they often come again."""
        for token in tokens if self._max_own else ():
            if token in self._common:
                continue
            known = token in state.own_ids
            state.own_ids.pop(token, None)
            state.own_ids[token] = None
            if not known:
                state.own_rows = None
        while len(state.own_ids) > self._max_own:
            state.own_ids.pop(next(iter(state.own_ids)))

    def _own(self, state: RequestState) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and matrix of the request's own tokens, rebuilt when they have changed."""
        if state.own_rows is None:
            state.own_tokens = torch.tensor(list(state.own_ids), device=self._device)
            state.own_rows = self._matrix[state.own_tokens].to(self._output.dtype)
        return state.own_tokens, state.own_rows

    def _take_in(self, states: list[RequestState]) -> None:
        """Adds entries of everything observed since the last tree; keeps the last one's output.

        All or nothing: until the end only memory after a request's entries is written.
        """
        busy = [state for state in states if state.pending]
        if not busy:
            return
        window = self._head.shape.window
        arrivals = [new_entries(state, window) for state in busy]
        hidden = self._head.fuse(torch.cat([one.features for one in arrivals]))
        tokens = torch.tensor([t for one in arrivals for t in one.tokens], device=self._device)
        sizes = [len(one.tokens) for one in arrivals]
        places = [
            torch.arange(one.position, one.position + size)
            for one, size in zip(arrivals, sizes, strict=True)
        ]
        query, key, value = self._project(tokens, hidden, torch.cat(places))
        # An entry that is not finite has a key that is not finite.
        finite = key.flatten(1).isfinite().all(1).tolist()
        ends = torch.tensor(sizes).cumsum(0) - 1
        at, attended = 0, []
        for one, size, end in zip(arrivals, sizes, ends.tolist(), strict=True):
            rows = slice(at, at + size)
            one.leave_out(finite[rows])
            self._put(one.state, one.state.length, key[rows], value[rows])
            # If even the last entry is dropped, its output is not used.
            oldest = min(one.oldest, one.end - 1)
            attended.append(self._attend(one.state, query[end : end + 1], oldest, one.end))
            at += size
        outputs = self._finish(hidden[ends], torch.cat(attended))
        for one, output in zip(arrivals, outputs, strict=True):
            one.settle(output)

    def _make_room(self, state: RequestState, more: int) -> None:
        """Makes room for the pending entries of the window and `more`; drops the oldest entries."""
        window = self._head.shape.window
        arriving = min(window, sum(len(tokens) for _, tokens in state.pending)) + more
        capacity = state.keys.shape[1]
        if state.length + arriving <= capacity:
            return
        kept = min(state.length - state.oldest, window)
        capacity = max(capacity, kept + arriving)
        moved = []
        for before in (state.keys, state.values):
            after = before.new_zeros((before.shape[0], capacity, before.shape[2]))
            after[:, :kept] = before[:, state.length - kept : state.length]
            moved.append(after)
        state.keys, state.values = moved
        state.oldest, state.length = 0, kept

    @staticmethod
    def _put(state: RequestState, begin: int, key: torch.Tensor, value: torch.Tensor) -> None:
        end = begin + key.shape[0]
        state.keys[:, begin:end] = key.transpose(0, 1)
        state.values[:, begin:end] = value.transpose(0, 1)

    # ---- one pass of the head ----

    def _project(
        self, tokens: torch.Tensor, hidden: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        needed = int(places.max()) + 1
        if needed > self._cos.shape[0]:
            tables = self._head.rotation(max(2048, 2 * needed))
            self._cos, self._sin = (table.to(self._device) for table in tables)
        places = places.to(self._device)
        embeddings, cos, sin = self._embedding[tokens].float(), self._cos[places], self._sin[places]
        if len(tokens) <= FEW_ROWS:
            return _attention_inputs(torch.cat([embeddings, hidden], -1), cos, sin, *self._inputs)
        query, key, value = self._head.project(embeddings, hidden)
        cos, sin = cos[:, None], sin[:, None]
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def _finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return _layer_output(self._head.residual(hidden), attended, *self._outputs)

    def _attend(
        self,
        state: RequestState,
        query: torch.Tensor,
        oldest: int,
        length: int,
        seen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [r, Hq, D] -> [r, Hq * D].

        Attends to the window of entries `oldest` to `length`, and to the m entries after them that
        `seen` [r, m] marks.
        """
        shape, rows = self._head.shape, query.shape[0]
        first = max(oldest, length - shape.window)
        last = length + (0 if seen is None else seen.shape[1])
        grouped = query.unflatten(1, (shape.num_kv_heads, -1)).transpose(0, 1).flatten(1, 2)
        bias = None
        if seen is not None:
            groups = shape.num_heads // shape.num_kv_heads
            bias = grouped.new_zeros(rows * groups, last - first)
            unseen = ~seen.repeat_interleave(groups, dim=0)
            bias[:, length - first :].masked_fill_(unseen, float("-inf"))
        attended = scaled_dot_product_attention(
            grouped[None], state.keys[None, :, first:last], state.values[None, :, first:last], bias
        )[0]
        return attended.unflatten(1, (rows, -1)).transpose(0, 1).reshape(rows, -1)

    def _guess(
        self, states: list[RequestState], hidden: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The best `count` tokens after each row of [B, .., hidden], with log probabilities."""
        normed = self._head.normalize(hidden)
        scores, common = self._head.linear(normed, self._output), self._to_target.shape[0]
        most = max(len(state.own_ids) for state in states)
        if most:
            more = scores.new_full((*scores.shape[:-1], most), float("-inf"))
            ids = torch.zeros(len(states), most, dtype=torch.int64, device=self._device)
            for index, state in enumerate(states):
                if state.own_ids:
                    tokens, rows = self._own(state)
                    ids[index, : len(tokens)] = tokens
                    more[index, ..., : len(tokens)] = self._head.linear(normed[index], rows)
            scores = torch.cat([scores, more], dim=-1)
        best, index = scores.topk(count, dim=-1)
        found = self._to_target[index.clamp(max=common - 1)]
        if most:
            own = (index - common).clamp(min=0).flatten(1)
            found = torch.where(index < common, found, ids.gather(1, own).view_as(index))
        # The log of the sum of exponentials; the maximum is known already.
        top = best[..., :1]
        total = (scores - top).exp_().sum(-1, keepdim=True).log_()
        return found, best - top - total

    # ---- trees ----

    def _grown(self, states: list[RequestState], tree: TreeConfig) -> list[DraftTree]:
        if not states:
            return []
        rows = tree.rows or _DEFAULT_ROWS
        return self._trees(states, self._grow(states, tree, rows), rows)

    def _grow(self, states: list[RequestState], tree: TreeConfig, rows: int) -> Growth:
        batch, depths = len(states), min(tree.depth, _MAX_STEPS)
        width = _width(depths, min(tree.top_k, self._to_target.shape[0]))
        hidden = torch.stack([state.hidden for state in states])
        tokens, scores = self._guess(states, hidden, width)  # [B, k]
        growth = Growth([tokens], [scores], [])
        kept = torch.arange(width, device=self._device).expand(batch, width)
        hidden = hidden[:, None].expand(-1, width, -1)
        seen = torch.zeros(batch, width, 0, dtype=torch.bool, device=self._device)
        own = torch.eye(width, dtype=torch.bool, device=self._device).expand(batch, -1, -1)
        for depth in range(1, depths):
            if self._complete(growth, scores, rows):
                break
            seen = torch.cat([seen, own], dim=2)
            hidden = self._step(states, tokens, hidden, seen, depth - 1)
            more, chances = self._guess(states, hidden, width)  # [B, k, k]
            chances = chances + scores[..., None]
            growth.tokens.append(more.flatten(1))
            growth.scores.append(chances.flatten(1))
            growth.parents.append(kept)
            scores, index = chances.flatten(1).topk(width, dim=-1)
            tokens = growth.tokens[-1].gather(1, index)
            above = index // width
            hidden = hidden.gather(1, above[..., None].expand(-1, -1, hidden.shape[2]))
            seen = seen.gather(1, above[..., None].expand(-1, -1, seen.shape[2]))
            kept = index + width + width * width * (depth - 1)
        return growth

    def _complete(self, growth: Growth, best: torch.Tensor, rows: int) -> bool:
        """Whether nothing below candidates scored `best` can be among the rows to keep."""
        scores = torch.cat(growth.scores, dim=1)
        if rows < 2:
            return True
        worst = self._least
        if scores.shape[1] >= rows - 1:
            worst = scores.topk(rows - 1, dim=1).values[:, -1].clamp(min=worst)
        return bool((best.amax(1) < worst).all())

    def _step(
        self,
        states: list[RequestState],
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        seen: torch.Tensor,
        depth: int,
    ) -> torch.Tensor:
        """Outputs [B, k, hidden] of entries `tokens` [B, k], `depth` rows ahead."""
        batch, width = tokens.shape
        places = torch.tensor([state.position + depth for state in states])
        flat = hidden.flatten(0, 1)
        places = places.repeat_interleave(width)
        query, key, value = self._project(tokens.flatten(), flat, places)
        attended = []
        for index, state in enumerate(states):
            rows = slice(index * width, (index + 1) * width)
            self._put(state, state.length + depth * width, key[rows], value[rows])
            entries = (state.oldest, state.length)
            attended.append(self._attend(state, query[rows], *entries, seen[index]))
        output = self._finish(flat, torch.cat(attended))
        return output.unflatten(0, (batch, width))

    def _trees(self, states: list[RequestState], growth: Growth, rows: int) -> list[DraftTree]:
        worth = (torch.cat(growth.scores, dim=1) >= self._least).sum(1).tolist()
        trees = []
        for index, (state, count) in enumerate(zip(states, worth, strict=True)):
            one = slice(index, index + 1)
            root = torch.tensor([state.root], device=self._device)
            built = tree_from_topk(
                [step[one] for step in growth.tokens],
                [step[one] for step in growth.scores],
                [step[one] for step in growth.parents],
                root,
                torch.zeros_like(root, dtype=torch.int32),
                min(rows, count + 1),
            )
            trees.append(DraftTree(built.tokens[0].tolist(), built.parents[0].tolist()))
        return trees

    def _check_tokens(self, name: str, tokens: Sequence[int]) -> None:
        for token in (min(tokens), max(tokens)) if len(tokens) else ():
            if not 0 <= token < self.vocab_size:
                raise NworError(f"{name}: got {token}, expected 0 to {self.vocab_size - 1}")

    def _state(self, request: Hashable) -> RequestState:
        state = self._requests.get(request)
        if state is None:
            raise NworError(f"request: got {request!r}, which has not begun")
        return state


def _require_target(name: str, head: Eagle3Head, embedding: torch.Tensor) -> None:
    """Raises unless the head in `name` is for a target with this embedding."""
    expected = (head.shape.target_vocabulary, head.shape.hidden)
    if tuple(embedding.shape) != expected:
        got = "vocabulary {} and hidden size {}"
        raise NworError(
            f"drafter: got a target of {got.format(*embedding.shape)}, but {name} is a head for "
            f"{got.format(*expected)}; use the drafter 'ngram', or train a head: "
            "python -m nwor_specpv.train.eagle3"
        )


def _width(depths: int, most: int) -> int:
    """Children of a row: at most `most`, and few enough for the limit on candidates."""
    return next(
        width
        for width in range(most, 0, -1)
        if width + (depths - 1) * width * width <= _MAX_CANDIDATES
    )
