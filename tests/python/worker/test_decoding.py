"""Remote drafting gives the tokens of plain decoding, for one client and for many at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nwor_specpv import DraftTree, NworError, Session, tree_from_parents
from nwor_specpv.models import stories
from nwor_specpv.transformers import Generator, load_model
from nwor_specpv.transformers.sessions import SessionTarget
from nwor_specpv.worker import Client, Judge, Limits, Server
from tests.python.models.tiny_decoding import decode_plain
from tests.python.specpv.contexts import DEVICES
from tests.python.worker.serving import (
    LENGTH,
    MODEL,
    PATIENCE_S,
    PLAIN,
    PROMPT,
    Calls,
    decode,
    ngram_tree,
    serving,
)


@pytest.mark.parametrize("branches", [0, 1, 3])
def test_decodes_like_plain_decoding(branches: int) -> None:
    with serving() as worker, worker.client.session("one") as session:
        tokens = decode(session, PROMPT, LENGTH, branches)
        assert tokens == PLAIN[: len(tokens)]
        stats = worker.store.stats()
        assert (stats["live"], stats["cache_misses"]) == (1, 1)
        # Only what is new was run: the prompt once, then one token and its drafts a call.
        assert stats["rows_run"] <= len(PROMPT) + stats["forwards"] * 13
    assert branches == 0 or stats["forwards"] < LENGTH


def test_a_remote_session_is_used_as_one_of_the_store() -> None:
    drafts = PLAIN[len(PROMPT) : len(PROMPT) + 3]
    tree = DraftTree([PROMPT[-1], 7, *drafts], [-1, 0, 0, 2, 3])
    with serving() as worker:
        local = Session(worker.store, "local").verify(tree, PROMPT)
        remote = worker.client.session("remote").verify(tree, PROMPT)
        for name in (
            "accepted_rows",
            "tokens",
            "next_token",
            "cache_hit",
            "length",
            "rows_run",
            "rows_saved",
            "finish",
        ):
            assert getattr(remote, name) == getattr(local, name), name
    assert (remote.tokens, remote.accepted_rows, remote.cache_hit) == (drafts, [2, 3, 4], False)


def test_a_tree_may_be_of_tensors() -> None:
    drafts = PLAIN[len(PROMPT) : len(PROMPT) + 2]
    tree = tree_from_parents(
        torch.tensor([[-1, 0, 0, 2]], dtype=torch.int32),
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([[PROMPT[-1], 7, *drafts]]),
    )
    with serving() as worker:
        assert worker.client.session("a").verify(tree, torch.tensor(PROMPT)).tokens == drafts


def test_chunks_and_ends_go_through() -> None:
    drafts = PLAIN[len(PROMPT) : len(PROMPT) + 20]
    chain = DraftTree([PROMPT[-1], *drafts[:8], (drafts[8] + 1) % 512, *drafts[9:]])
    with serving() as worker:
        result = worker.client.session("a").verify(chain, PROMPT, chunk_rows=4)
        assert (result.tokens, result.next_token) == (drafts[:8], drafts[8])
        assert result.rows_saved > 0
        result = worker.client.session("b").verify(chain, PROMPT, max_new_tokens=3)
        assert (result.finish, result.tokens, result.next_token) == (
            "length",
            drafts[:2],
            drafts[2],
        )
        stop = drafts[4]
        first = drafts.index(stop)
        result = worker.client.session("c").verify(chain, PROMPT, stop_ids=[stop])
        assert (result.finish, result.tokens, result.next_token) == ("stop", drafts[:first], stop)


def test_clients_at_once_are_right() -> None:
    prompts = [PROMPT[: 3 + index] for index in range(6)]
    plain = [prompt + decode_plain(MODEL, prompt, LENGTH).tokens for prompt in prompts]

    def run(index: int) -> list[int]:
        with Client(worker.server.address, timeout=PATIENCE_S) as client:
            session = client.session(f"s{index}")
            return decode(session, prompts[index], LENGTH // 2, index % 4)

    with serving() as worker:
        calls = Calls(*(lambda index=index: run(index) for index in range(6)))
        for tokens, expected in zip(calls.outcomes(), plain, strict=True):
            assert tokens == expected[: len(tokens)]
        assert worker.store.stats()["live"] == 6


def test_calls_that_wait_share_a_pass() -> None:
    names = [f"s{index}" for index in range(5)]
    with serving() as worker:
        worker.target.gate.clear()
        first = Calls(lambda: worker.client.session("first").verify(None, PROMPT))
        assert worker.target.entered.wait(PATIENCE_S)
        tree = ngram_tree(PROMPT, 2)
        others = Calls(
            *(lambda name=name: worker.client.session(name).verify(tree, PROMPT) for name in names)
        )
        worker.until_waiting(5)
        worker.target.gate.set()
        results = first.outcomes() + others.outcomes()
        assert [sorted(batch) for batch in worker.target.batches] == [["first"], names]
    assert {[*result.tokens, result.next_token][0] for result in results} == {PLAIN[len(PROMPT)]}


def test_two_calls_of_a_session_take_their_turns() -> None:
    follow = PLAIN[len(PROMPT)]
    with serving() as worker:
        worker.client.session("a").verify(None, PROMPT)
        worker.target.gate.clear()
        worker.target.entered.clear()
        busy = Calls(lambda: worker.client.session("busy").verify(None, PROMPT))
        assert worker.target.entered.wait(PATIENCE_S)
        sessions = [worker.client.session("a") for _ in range(2)]
        one = Calls(lambda: sessions[0].verify(None, [follow], len(PROMPT)))
        worker.until_waiting(1)
        two = Calls(lambda: sessions[1].verify(None, [PLAIN[len(PROMPT) + 1]], len(PROMPT) + 1))
        worker.until_waiting(2)
        worker.target.gate.set()
        busy.outcomes()
        (first,), (second,) = one.outcomes(), two.outcomes()
    assert [first.next_token, second.next_token] == PLAIN[len(PROMPT) + 1 : len(PROMPT) + 3]


def test_a_long_prompt_goes_behind_those_that_came_before_it() -> None:
    text = (PROMPT * 40)[:400]
    with serving() as worker:
        worker.target.gate.clear()
        first = Calls(lambda: worker.client.session("first").verify(None, PROMPT))
        assert worker.target.entered.wait(PATIENCE_S)
        short = Calls(lambda: worker.client.session("short").verify(None, PROMPT))
        worker.until_waiting(1)
        long = Calls(lambda: worker.client.session("long").verify(None, text))
        worker.until_waiting(2)
        worker.target.gate.set()
        outcomes = first.outcomes() + short.outcomes() + long.outcomes()
        assert [batch[0] for batch in worker.target.batches][:3] == ["first", "short", "long"]
        assert len(worker.target.batches) > 3
    assert outcomes[2].length == len(text)


def test_more_than_a_batch_holds_goes_in_several() -> None:
    with serving(max_batch=2) as worker:
        worker.target.gate.clear()
        calls = [Calls(lambda: worker.client.session("first").verify(None, PROMPT))]
        assert worker.target.entered.wait(PATIENCE_S)
        for name in "abc":
            calls.append(Calls(lambda name=name: worker.client.session(name).verify(None, PROMPT)))
        worker.until_waiting(3)
        worker.target.gate.set()
        assert {call.outcomes()[0].next_token for call in calls} == {PLAIN[len(PROMPT)]}
        assert max(map(len, worker.target.batches)) == 2


@pytest.fixture(scope="module")
def story_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stories(progress=lambda *_: None, destination=tmp_path_factory.mktemp("m") / "stories")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("branches", [1, 3])
def test_a_model_of_transformers_decodes_as_its_generator(
    story_folder: Path, device: str, branches: int
) -> None:
    model, _ = load_model(story_folder, "float32", device)
    expected = Generator(model, drafter="ngram").generate(PROMPT, LENGTH, eos_token_id=-1)
    target = SessionTarget(model, cache_tokens=1024)
    server = Server(
        target.store,
        model="stories",
        vocab_size=target.vocab_size,
        limits=Limits(max_prompt_tokens=target.max_length),
    )
    with server, Client(server.address, timeout=PATIENCE_S) as client:
        both = Calls(
            lambda: decode(client.session("a"), PROMPT, LENGTH, branches),
            lambda: decode(client.session("b"), PROMPT[:9], LENGTH, 0),
        )
        tokens, other = both.outcomes()
    assert tokens[: len(PROMPT) + LENGTH] == PROMPT + expected.token_ids
    assert tokens == PLAIN[: len(tokens)]
    assert other == (PROMPT[:9] + decode_plain(MODEL, PROMPT[:9], LENGTH).tokens)[: len(other)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_of_transformers_samples(story_folder: Path, device: str) -> None:
    """Tokens come from the top-k of the model that sees everything, alike in any company."""
    model, _ = load_model(story_folder, "float32", device)
    judge = Judge()
    target = SessionTarget(model, cache_tokens=1024, accept=judge.accept)
    server = Server(
        target.store,
        model="stories",
        vocab_size=target.vocab_size,
        limits=Limits(max_prompt_tokens=target.max_length),
        judge=judge,
    )
    options = {"temperature": 1.0, "top_k": 4, "seed": 11}
    with server, Client(server.address, timeout=PATIENCE_S) as client:
        alone = decode(client.session("alone"), PROMPT, LENGTH, 2, **options)
        both = Calls(
            lambda: decode(client.session("a"), PROMPT, LENGTH, 2, **options),
            lambda: decode(client.session("b"), PROMPT[:9], LENGTH, 2),
        )
        sampled, greedy = both.outcomes()
    assert sampled == alone != PLAIN[: len(alone)]
    assert greedy == (PROMPT[:9] + decode_plain(MODEL, PROMPT[:9], LENGTH).tokens)[: len(greedy)]
    with torch.no_grad():
        logits = model(torch.tensor([alone], device=device)).logits[0, len(PROMPT) - 1 : -1]
    best = logits.topk(4).indices.tolist()
    assert all(token in row for token, row in zip(alone[len(PROMPT) :], best, strict=True))


def test_what_a_model_of_transformers_refuses_is_no_fault_of_the_client(
    story_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load_model(story_folder)
    target = SessionTarget(model, cache_tokens=1024)

    def refuse(*_: object) -> None:
        raise NworError("model: got something else")

    monkeypatch.setattr(target._runner, "run", refuse)
    with pytest.raises(RuntimeError, match="the model failed: model: got something else"):
        target.store.verify("a", None, PROMPT)
