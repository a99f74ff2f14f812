"""The loop of a remote drafter: plain decoding's tokens, also when workers come and go."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from nwor_specpv import NworError, TreeConfig, make_drafter
from nwor_specpv.worker import Client, Server, WorkerError
from nwor_specpv.worker.drafting import decode
from tests.python.worker.serving import (
    LENGTH,
    PATIENCE_S,
    PLAIN,
    PROMPT,
    Calls,
    GatedHost,
    serving,
)

EXPECTED = PLAIN[len(PROMPT) : len(PROMPT) + LENGTH]


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_it_decodes_like_plain_decoding(drafter: str | None) -> None:
    heard: list[int] = []
    with serving() as worker:
        done = decode(
            worker.client,
            drafter and make_drafter(drafter),
            PROMPT,
            LENGTH,
            on_token=heard.append,
        )
        assert worker.client.ping().sessions == 0
    assert done.token_ids == heard == EXPECTED
    assert (done.finish, done.calls <= LENGTH) == ("length", True)
    assert done.accepted == LENGTH - done.calls
    assert done.tokens_per_call == LENGTH / done.calls
    assert done.acceptance_rate == (done.accepted / done.drafts if done.drafts else 0)
    assert 0 < done.run_seconds < done.seconds
    assert (done.drafts > 0) == (drafter is not None)


def test_it_ends_at_a_stop_token() -> None:
    stop = EXPECTED[10]
    with serving() as worker:
        done = decode(worker.client, make_drafter("ngram"), PROMPT, LENGTH, stop_ids=[stop])
    assert done.finish == "stop"
    assert done.token_ids == EXPECTED[: EXPECTED.index(stop) + 1]


def test_a_seed_repeats_with_drafts_of_its_own() -> None:
    with serving() as worker:
        texts = [
            decode(
                worker.client, make_drafter("ngram"), PROMPT, 20, temperature=0.8, seed=seed
            ).token_ids
            for seed in (1, 1, 2)
        ]
    assert texts[0] == texts[1] != texts[2]


def test_a_worker_that_restarts_is_found_again() -> None:
    """The next one knows nothing of the session and gets the whole sequence."""
    first = GatedHost()
    server = Server(first.store, model="m", vocab_size=512, judge=first.judge).start()
    port, second = server.port, GatedHost()
    replaced: list[Server] = []
    heard: list[int] = []

    def replace() -> None:
        server.stop()
        new = Server(second.store, model="m", vocab_size=512, judge=second.judge, port=port)
        replaced.append(new.start())

    def on_token(token: int) -> None:
        heard.append(token)
        if len(heard) == 10:
            threading.Thread(target=replace).start()

    with Client(server.address, timeout=PATIENCE_S) as client:
        done = decode(
            client,
            make_drafter("ngram"),
            PROMPT,
            LENGTH,
            on_token=on_token,
            retry_seconds=PATIENCE_S,
            tree=TreeConfig(rows=3, depth=2),
        )
    replaced[0].stop()
    assert done.token_ids == EXPECTED
    assert first.batches


def test_a_worker_that_is_gone_is_an_error_and_what_came_is_kept() -> None:
    heard: list[int] = []

    def on_token(token: int) -> None:
        heard.append(token)
        if len(heard) == 5:
            worker.server.stop()

    with serving() as worker:
        with pytest.raises(WorkerError) as raised:
            decode(worker.client, None, PROMPT, LENGTH, on_token=on_token)
        assert raised.value.code == "UNAVAILABLE"
    assert heard == EXPECTED[:5]


def test_two_drafters_share_a_worker() -> None:
    with serving() as worker:
        calls = Calls(
            *(
                lambda: decode(worker.client, make_drafter("ngram"), PROMPT, LENGTH).token_ids
                for _ in range(3)
            )
        )
        assert calls.outcomes() == [EXPECTED] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "prompt: got no tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"top_k": 3}, "top_k: got 3 beside temperature 0"),
    ],
)
def test_wrong_use_is_named(options: dict[str, Any], message: str) -> None:
    arguments = {"prompt": PROMPT, "max_new_tokens": 5} | options
    with serving() as worker, pytest.raises(NworError, match=message):
        decode(worker.client, None, **arguments)
