"""Steps whose commit is refused, in one piece or in chunks, on made-up layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_specpv import COMMIT_ERRORS
from nwor_specpv.errors import NworError
from nwor_specpv.vllm import steps
from nwor_specpv.vllm.faults import Faults
from nwor_specpv.vllm.settings import read_settings
from nwor_specpv.vllm.staging import Staging

PAGES, SIZE, HEADS, DIM = 4, 16, 2, 64
SLOTS = torch.tensor([3, 4, 5, 6, 7])  # of a root and four drafts


class Refusing:
    """An interceptor one of whose commits does nothing and says why."""

    def __init__(self, interceptor: Any, error: str, call: int = 1) -> None:
        self._interceptor, self._error, self._call = interceptor, error, call
        self.commits = 0

    def commit(self, *args: Any, **kwargs: Any) -> Any:
        self.commits += 1
        if self.commits != self._call:
            return self._interceptor.commit(*args, **kwargs)
        if kwargs.get("last", True):
            self._interceptor.abort()  # the round is over
        verdict = SimpleNamespace(error=self._error)
        return SimpleNamespace(ok=False, verdict=verdict, problem="made up")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._interceptor, name)


class World:
    """Layers "a", "b".. and a step in which they have written their rows."""

    def __init__(
        self,
        error: str = "write_failed",
        call: int = 1,
        layers: int = 1,
        *,
        recovers: bool = False,
        agrees: bool = False,
        device: str = "cpu",
        **keys: Any,
    ) -> None:
        torch.manual_seed(1)
        self.slots = SLOTS.to(device)
        self.caches = {
            name: torch.zeros(PAGES, HEADS, SIZE, 2 * DIM, dtype=torch.bfloat16, device=device)
            for name in "abc"[:layers]
        }
        config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=torch.bfloat16),
            parallel_config=None,
            kv_transfer_config=None,
            compilation_config=SimpleNamespace(max_cudagraph_capture_size=0),
        )
        held = {name: SimpleNamespace(kv_cache=cache) for name, cache in self.caches.items()}
        self.faults = Faults(recovers=recovers)
        staging = Staging(held, read_settings({"nwor_specpv": keys}, {}), config, 16, self.faults)
        staging.groups = [list(held)]
        staging.bind(self.slots.device)
        if agrees:  # with nobody
            staging._settings = read_settings({"nwor_specpv": {"agreement_group": "tp"}}, {})
        self.interceptor = staging.interceptor = Refusing(staging.interceptor, error, call)
        self.steps = steps.Steps(staging, self.faults)
        self.begin()
        for name in held:
            self.write(name)

    def begin(self) -> None:
        self.steps.begin(0, [5], [4], self.slots)

    def write(self, layer: str, by: int = 0) -> None:
        """With `by` to slots that are so many further."""
        self.key, self.value = torch.randn(2, 5, HEADS, DIM).to(self.slots.device, torch.bfloat16)
        assert self.steps.write(layer, self.key, self.value, self.slots + by)

    def finish(self, accepted: int) -> None:
        self.steps.finish(lambda drafts: torch.full_like(drafts, accepted))

    def written(self) -> list[int]:
        """The rows of layer "a" that are in their slots, key and value."""
        pages = self.caches["a"].transpose(1, 2).reshape(PAGES * SIZE, HEADS, 2 * DIM)
        rows = torch.cat((self.key, self.value), dim=-1)
        found = [row for row, slot in enumerate(SLOTS) if torch.equal(pages[slot], rows[row])]
        untouched = pages.flatten(1).any(1).sum() == len(found)
        assert untouched
        return found


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MAX_COMMIT_ENTRIES", 1)


@pytest.mark.parametrize("accepted", [0, 2, 4])
def test_chunks_commit_what_was_accepted(short_chunks: None, accepted: int) -> None:
    world = World(call=-1)
    world.finish(accepted)
    assert world.interceptor.commits == 4
    assert world.written() == list(range(accepted + 1))
    assert world.interceptor.stats()["fallbacks"] == {}


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_refused_chunk_is_the_last(short_chunks: None, call: int) -> None:
    """Later chunks may have nothing to write, and would say that all is well."""
    world = World(call=call)
    world.finish(call)
    assert world.interceptor.commits == call
    assert world.written() == list(range(call + 1))
    stats = world.interceptor.stats()
    assert stats["fallbacks"] == {"commit_failure": 1}
    assert not stats["round_open"]


@pytest.mark.parametrize("call", [1, 2, 4])
def test_a_rank_writes_nothing_on_its_own(short_chunks: None, call: int) -> None:
    """Ranks that disagree would each write other rows."""
    world = World("rank_disagreement", call)
    with pytest.raises(NworError, match="ranks accepted different tokens"):
        world.finish(4)
    assert world.interceptor.commits == call
    assert world.written() == list(range(call)), "what chunks before it have committed"
    stats = world.interceptor.stats()
    assert stats["fallbacks"] == {"commit_lost": 1}
    assert not stats["round_open"]


@pytest.mark.parametrize("reason", ["slot_mismatch", "write_failed"])
def test_what_one_of_agreeing_ranks_refuses_none_has_written(reason: str) -> None:
    """But for a write that failed when all had agreed."""
    world = World(reason, recovers=True, agrees=True)
    world.finish(4)
    alone = reason == "write_failed"
    assert world.written() == ([0, 1, 2, 3, 4] if alone else [0])
    told = "commit_failure" if alone else "commit_lost"
    assert world.interceptor.stats()["fallbacks"] == {told: 1}
    notice = world.faults.take()
    assert notice is not None
    assert notice.lost is not alone


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_without_room_hears_that_the_others_refused(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Its own drafts are in its cache, and theirs are not in theirs."""
    world = World("rank_disagreement", recovers=True, agrees=True, max_staging_bytes=1)
    assert not world.steps.stages
    if late:
        commit = world.interceptor.commit
        monkeypatch.setattr(world.steps, "_learns_late", lambda _: True)
        monkeypatch.setattr(
            world.interceptor,
            "commit",
            lambda *_, **__: (commit(), refused("rank_disagreement"))[1],
        )
    world.finish(4)
    if late:
        assert world.faults.take() is None
        world.steps.finish(lambda _: pytest.fail("a step without drafts"))
    notice = world.faults.take()
    assert notice is not None
    assert notice.lost
    assert world.interceptor.stats()["fallbacks"]["commit_lost"] == 1
    assert not world.interceptor.stats()["round_open"]


@pytest.mark.parametrize("wrote", [False, True], ids=["did not run", "wrote elsewhere"])
def test_a_layer_that_staged_nothing_gets_no_rows_of_an_earlier_step(wrote: bool) -> None:
    """Staging still has the drafts that were rejected then."""
    world = World(call=-1, layers=2)
    world.finish(0)
    world.steps.begin(0, [5], [4], SLOTS)
    world.write("a")
    if wrote:  # to other slots than the step's first layer: its caller writes
        assert not world.steps.write("b", world.key, world.value, SLOTS + SIZE)
    before = world.caches["b"].clone()
    world.finish(4)
    assert world.written() == [0, 1, 2, 3, 4]
    assert torch.equal(world.caches["b"], before)
    assert world.interceptor.stats()["fallbacks"]["commit_failure"] == 1


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_rows_of_a_tree_go_to_consecutive_slots(
    monkeypatch: pytest.MonkeyPatch, chunked: bool, refused: bool
) -> None:
    """Also if they are written one by one, and if the step has rows of a prompt behind it."""
    if chunked:
        monkeypatch.setattr(steps, "MAX_COMMIT_ENTRIES", 2)
    world = World(call=-1)
    world.finish(0)
    slots = torch.tensor([*SLOTS.tolist(), 20, 21])
    world.interceptor._call = world.interceptor.commits + 1 if refused else -1
    world.steps.begin(0, [5, 2], [4, 0], slots, trees=True)
    assert world.steps.stages
    key, value = torch.randn(2, 7, HEADS, DIM).to(torch.bfloat16)
    before = world.caches["a"].clone()
    assert world.steps.write("a", key, value, slots)
    path = torch.tensor([[2, 4, -1], [-1, -1, -1]], dtype=torch.int32)
    places = torch.tensor([[1, 2, 3], [6, 6, 6]])
    world.steps.finish(
        lambda drafts: torch.tensor([2, 0], dtype=torch.int32), steps.TreePaths(path, places)
    )
    pages = world.caches["a"].transpose(1, 2).reshape(PAGES * SIZE, HEADS, 2 * DIM)
    rows = torch.cat((key, value), dim=-1)
    wanted = before.transpose(1, 2).reshape(PAGES * SIZE, HEADS, 2 * DIM).clone()
    for slot, row in {3: 0, 4: 2, 5: 4, 20: 5, 21: 6}.items():
        wanted[slot] = rows[row]
    assert torch.equal(pages, wanted)
    fallbacks = world.interceptor.stats()["fallbacks"]
    assert fallbacks == ({"commit_failure": 1} if refused else {})
    assert not world.steps.stages


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = property(lambda _: True)


@pytest.mark.parametrize("capture", [False, True])
def test_single_rows_without_drafts_are_vllms_to_write(capture: bool) -> None:
    """In a captured graph and where it is replayed alike."""
    world = World()
    key = value = torch.zeros(2, HEADS, DIM, dtype=torch.bfloat16)
    epoch = world.interceptor.stats()["epoch"]
    world.steps.begin(0, [1, 1], [0, 0], SLOTS[:2], capture)
    assert not world.interceptor.stats()["round_open"]
    assert not world.steps.write("a", key, value, SLOTS[:2])
    world.steps.finish(lambda _: pytest.fail("nobody asks what was accepted"))
    assert world.interceptor.stats()["epoch"] == epoch
    assert world.interceptor.commits == 0
    # Rows of a prompt are ours as ever.
    world.steps.begin(0, [2], [0], SLOTS[:2])
    assert world.interceptor.stats()["round_open"]
    world.steps.abort()


def refused(code: str) -> Any:
    """What a commit on a GPU leaves behind: words that are read later."""
    status = torch.zeros(8, dtype=torch.int64)
    status[:4] = torch.tensor([COMMIT_ERRORS.index(code), 1, 2, 33])
    return SimpleNamespace(status=status)


def finish_late(world: World, accepted: int = 4) -> None:
    """As on a GPU, where counts are and nobody waits for a commit."""
    world.steps.finish(lambda drafts: torch.full_like(drafts, accepted).as_subclass(OnDevice))


@pytest.mark.parametrize("code", [*COMMIT_ERRORS[1:6], *COMMIT_ERRORS[7:]])
@pytest.mark.parametrize("call", [1, 3])
def test_every_chunk_on_a_gpu_is_heard_of_in_the_next_step(
    short_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: str,
    call: int,
) -> None:
    world, made = World(call=-1, recovers=True), []

    def commit(*_: Any, **__: Any) -> Any:
        made.append(refused(code if len(made) + 1 == call else "ok"))
        return made[-1]

    monkeypatch.setattr(world.interceptor, "commit", commit)
    finish_late(world)
    assert len(made) == 4
    assert not world.faults.drafts_are_off, "nobody has waited"
    world.steps.finish(lambda _: pytest.fail("a step without drafts"))
    assert world.faults.drafts_are_off
    notice = world.faults.take()
    assert notice is not None
    assert notice.lost
    assert world.interceptor.stats()["fallbacks"] == {"commit_lost": 1}
    assert caplog.text.count("nwor_specpv bypass (commit_lost)") == 1
    assert f"refused with {code} (request 1, index 2, value 33)" in caplog.text
    world.steps.finish(lambda _: pytest.fail("a step without drafts"))
    assert world.interceptor.stats()["fallbacks"] == {"commit_lost": 1}, "said once"


def test_elsewhere_a_commit_that_a_gpu_refused_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step after the next one is planned already, and begins before vLLM has seen the error."""
    world = World(call=-1)
    monkeypatch.setattr(world.interceptor, "commit", lambda *_, **__: refused("duplicate_slot"))
    finish_late(world)
    world.interceptor.abort()  # the round that the refused commit has ended
    world.steps.begin(0, [5], [4], SLOTS)
    with pytest.raises(NworError, match=r"refused with duplicate_slot .* restart the server"):
        world.steps.finish(lambda _: pytest.fail("nothing is committed"))
    world.steps.begin(0, [5], [4], SLOTS)
    assert world.interceptor.stats()["fallbacks"] == {"commit_lost": 1}
