"""Every public call with every kind of wrong argument: NworError, named, and not a byte is written.

Wrong values that only the device sees (a commit op's path, counts and slots) are reported in the
status tensor instead, again without a byte written.
"""

from __future__ import annotations

import pytest
import torch

import nwor_specpv
from nwor_specpv import COMMIT_ERRORS, Interceptor, NworConfig, NworError, RoundPlan
from tests.python.kv_interceptor.wrong_arguments import (
    DIM,
    HEADS,
    INT32,
    INT64,
    LAYERS,
    PAGES,
    ROWS,
    TOKENS,
    Arguments,
    Change,
    as_bytes,
    cache_kinds,
    expect_message,
    expect_refusal,
    filled,
    index_kinds,
    ints,
    memory_of,
    names_an_argument_of,
    parametrize,
    poke,
    rows_kinds,
    scale_kinds,
)

# ---- ops.write_kv ----


def write_arguments(cache_dtype: torch.dtype = torch.float32) -> Arguments:
    arguments = {
        "key": filled(ROWS, HEADS, DIM),
        "value": filled(ROWS, HEADS, DIM) * 2,
        "key_cache": filled(PAGES, TOKENS, HEADS, DIM, dtype=cache_dtype),
        "value_cache": filled(PAGES, TOKENS, HEADS, DIM, dtype=cache_dtype),
        "slot_mapping": ints(0, 9, -1, 3, 15, dtype=INT64),
        "stage_rows": ints(-1, 0, 2, 1, -1, dtype=INT32),
        "staged_key": filled(3, HEADS, DIM),
        "staged_value": filled(3, HEADS, DIM),
        "status": torch.zeros(8, dtype=INT64),
    }
    if cache_dtype == torch.float8_e4m3fn:
        arguments |= {"k_scale": torch.ones(1), "v_scale": torch.ones(HEADS)}
    return arguments


def staged_kinds(name: str) -> dict[str, Change]:
    kinds = rows_kinds(name)
    kinds[f"{name}: channel stride"] = lambda a: {name: torch.zeros(3, HEADS, 2 * DIM)[..., ::2]}
    return kinds


WRITE_KINDS = {
    **rows_kinds("key"),
    **rows_kinds("value"),
    **cache_kinds("key_cache"),
    **cache_kinds("value_cache"),
    **index_kinds("slot_mapping", INT32),
    **index_kinds("stage_rows", INT64),
    **staged_kinds("staged_key"),
    **staged_kinds("staged_value"),
    **index_kinds("status", INT32),
    "slot_mapping: below -1": poke("slot_mapping", 2, -2),
    "slot_mapping: beyond the cache": poke("slot_mapping", 4, PAGES * TOKENS),
    "slot_mapping: far beyond": poke("slot_mapping", 4, 2**40),
    "slot_mapping: twice": poke("slot_mapping", 4, 0),
    "stage_rows: below -1": poke("stage_rows", 0, -2),
    "stage_rows: beyond staging": poke("stage_rows", 0, 3),
    "stage_rows: twice": poke("stage_rows", 0, 1),
    "k_scale: for a float32 cache": lambda a: {"k_scale": torch.ones(1)},
}


@parametrize(WRITE_KINDS)
def test_write_kv_refuses(name: str, change: Change) -> None:
    arguments = write_arguments()
    wrong = arguments | change(arguments)
    either = names_an_argument_of(name, arguments)
    if name == "key" and "slot_mapping" in arguments:
        either = f"({either}|slot_mapping)"  # one row less of key and value both
    expect_refusal(either, lambda: nwor_specpv.write_kv(**wrong), memory_of(arguments))


@parametrize({**scale_kinds("k_scale"), **scale_kinds("v_scale")})
def test_write_kv_refuses_scales(name: str, change: Change) -> None:
    arguments = write_arguments(torch.float8_e4m3fn)
    wrong = arguments | change(arguments)
    expect_refusal(name, lambda: nwor_specpv.write_kv(**wrong), memory_of(arguments))


def test_write_kv_with_the_right_arguments_writes() -> None:
    for dtype in (torch.float32, torch.float8_e4m3fn):
        arguments = write_arguments(dtype)
        before = as_bytes(arguments["key_cache"])
        nwor_specpv.write_kv(**arguments)
        assert as_bytes(arguments["key_cache"]) != before


# ---- ops.commit ----


def commit_arguments(cache_dtype: torch.dtype = torch.float32) -> Arguments:
    cache = (PAGES, TOKENS, HEADS, DIM)
    arguments = {
        "staged_key": filled(LAYERS, ROWS, HEADS, DIM),
        "staged_value": filled(LAYERS, ROWS, HEADS, DIM) * 2,
        "key_caches": [filled(*cache, dtype=cache_dtype) for _ in range(LAYERS)],
        "value_caches": [filled(*cache, dtype=cache_dtype) for _ in range(LAYERS)],
        "path": torch.tensor([[0, 2, -1], [3, -1, -1]], dtype=INT32),
        "counts": ints(2, 1, dtype=INT32),
        "slots": torch.tensor([[4, 5, -1], [11, -1, -1]], dtype=INT64),
        "status": torch.zeros(8, dtype=INT64),
        "parents": ints(-1, 0, 0, -1, 3, dtype=INT32),
    }
    if cache_dtype == torch.float8_e4m3fn:
        arguments |= {
            "k_scales": [torch.ones(1)] * LAYERS,
            "v_scales": [torch.ones(HEADS)] * LAYERS,
        }
    return arguments


def in_layer(name: str, kinds: dict[str, Change]) -> dict[str, Change]:
    """The kinds of one tensor, applied to the last entry of a list."""

    def lift(change: Change) -> Change:
        def lifted(arguments: Arguments) -> Arguments:
            changed = change({name: arguments[name][-1]})
            return {name: [*arguments[name][:-1], changed[name]]}

        return lifted

    return {what: lift(change) for what, change in kinds.items()}


def list_kinds(name: str) -> dict[str, Change]:
    return {
        f"{name}: none": lambda a: {name: []},
        f"{name}: one less": lambda a: {name: a[name][:-1]},
        f"{name}: one more": lambda a: {name: [*a[name], a[name][0]]},
    }


def staging_kinds(name: str) -> dict[str, Change]:
    return {
        f"{name}: float64": lambda a: {name: a[name].double()},
        f"{name}: int32": lambda a: {name: torch.zeros(a[name].shape, dtype=INT32)},
        f"{name}: rank": lambda a: {name: a[name][0]},
        f"{name}: layers": lambda a: {name: a[name][:1]},
        f"{name}: rows": lambda a: {name: a[name][:, :-1]},
        f"{name}: heads": lambda a: {name: a[name][:, :, :1]},
        f"{name}: channels": lambda a: {name: a[name][..., :-1]},
        f"{name}: channel stride": lambda a: {
            name: torch.zeros(LAYERS, ROWS, HEADS, 2 * DIM)[..., ::2]
        },
        f"{name}: device": lambda a: {name: a[name].to("meta")},
    }


COMMIT_KINDS = {
    **staging_kinds("staged_key"),
    **staging_kinds("staged_value"),
    **list_kinds("key_caches"),
    **list_kinds("value_caches"),
    **in_layer("key_caches", cache_kinds("key_caches")),
    **in_layer("value_caches", cache_kinds("value_caches")),
    **index_kinds("path", INT64),
    **index_kinds("counts", INT64),
    **index_kinds("slots", INT32),
    **index_kinds("status", INT32),
    **index_kinds("parents", INT64),
    "path: depth": lambda a: {"path": a["path"][:, :2].contiguous()},
    "path: more than fits a commit": lambda a: {
        "path": torch.zeros(2, 5000, dtype=INT32),
        "slots": torch.zeros(2, 5000, dtype=INT64),
    },
    "slots: depth": lambda a: {"slots": a["slots"][:, :2].contiguous()},
    "k_scales: for a float32 cache": lambda a: {"k_scales": [torch.ones(1)] * LAYERS},
}


@parametrize(COMMIT_KINDS)
def test_commit_refuses(name: str, change: Change) -> None:
    arguments = commit_arguments()
    wrong = arguments | change(arguments)
    # A cache of a list is called as in the other calls; path, counts and slots belong together.
    names = {
        "key_caches": "(key_caches?|value_caches?|staged_key)",
        "value_caches": "(key_caches?|value_caches?|staged_key)",
        "path": "(path|counts|slots)",
        "staged_key": "(staged_key|staged_value|parents)",
        "staged_value": "(staged_key|staged_value)",
        "k_scales": "k_scale",
    }
    expect_refusal(names.get(name, name), lambda: nwor_specpv.commit(**wrong), memory_of(arguments))


@parametrize(
    {
        **list_kinds("k_scales"),
        **list_kinds("v_scales"),
        **in_layer("k_scales", scale_kinds("k_scales")),
        **in_layer("v_scales", scale_kinds("v_scales")),
    }
)
def test_commit_refuses_scales(name: str, change: Change) -> None:
    arguments = commit_arguments(torch.float8_e4m3fn)
    changed = change(arguments)
    if changed[name] == []:
        return  # no scales at all is legal
    expect_refusal(
        f"{name}?", lambda: nwor_specpv.commit(**(arguments | changed)), memory_of(arguments)
    )


@pytest.mark.parametrize(
    ("error", "change", "where"),
    [
        ("count_range", poke("counts", 1, 4), (1, 0, 4)),
        ("count_range", poke("counts", 0, -1), (0, 0, -1)),
        ("path_range", poke("path", (0, 1), ROWS), (0, 1, ROWS)),
        ("path_range", poke("path", (1, 0), -1), (1, 0, -1)),
        ("path_range", poke("path", (1, 0), -(2**31)), (1, 0, -(2**31))),
        ("not_a_chain", poke("path", (0, 1), 3), (0, 1, 3)),
        ("not_a_chain", poke("path", (0, 0), 1), (0, 0, 1)),
        ("slot_range", poke("slots", (0, 0), PAGES * TOKENS), (0, 0, PAGES * TOKENS)),
        ("slot_range", poke("slots", (1, 0), -1), (1, 0, -1)),
        ("slot_range", poke("slots", (1, 0), 2**40), (1, 0, 2**40)),
        ("duplicate_slot", poke("slots", (1, 0), 5), (1, 0, 5)),
    ],
)
def test_commit_reports_wrong_values_in_its_status(error: str, change: Change, where) -> None:
    arguments = commit_arguments()
    arguments |= change(arguments)
    watched = [tensor for tensor in memory_of(arguments) if tensor is not arguments["status"]]
    before = [as_bytes(tensor) for tensor in watched]
    nwor_specpv.commit(**arguments)
    status = arguments["status"].tolist()
    assert COMMIT_ERRORS[status[0]] == error
    assert tuple(status[1:4]) == where
    assert status[4] == 0
    assert [as_bytes(tensor) for tensor in watched] == before


def test_commit_with_the_right_arguments_writes() -> None:
    for dtype in (torch.float32, torch.float8_e4m3fn):
        arguments = commit_arguments(dtype)
        nwor_specpv.commit(**arguments)
        assert arguments["status"].tolist() == [0, 0, 0, 0, 3, 0, 0, 0]


# ---- Interceptor ----


class Engine:
    """Two layers bound, and a round open when asked for: a root, two drafts, a prefill row."""

    def __init__(self, open_round: bool = True, stage: bool = False):
        cache = (PAGES, TOKENS, HEADS, DIM)
        self.caches = [filled(*cache) for _ in range(2 * LAYERS)]
        self.interceptor = Interceptor(NworConfig())
        for layer in range(LAYERS):
            self.interceptor.bind_layer(f"layer{layer}", *self.caches[2 * layer : 2 * layer + 2])
        if open_round:
            self.interceptor.begin(RoundPlan([3, 1], [2, 0]))
        if stage:
            for layer in range(LAYERS):
                self.interceptor.write(**(self.write_arguments() | {"layer": f"layer{layer}"}))

    @staticmethod
    def write_arguments() -> Arguments:
        return {
            "layer": "layer0",
            "key": filled(4, HEADS, DIM),
            "value": filled(4, HEADS, DIM) * 2,
            "slot_mapping": ints(1, 2, 3, 8, dtype=INT64),
            "rows": None,
        }

    @staticmethod
    def commit_arguments() -> Arguments:
        return {
            "path": torch.tensor([[1, 2], [-1, -1]], dtype=INT32),
            "counts": ints(2, 0, dtype=INT32),
            "slots": torch.tensor([[2, 3], [-1, -1]], dtype=INT64),
            "rows": "batch",
        }


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("staging_rows", {"staging_rows": -1}),
        ("staging_rows", {"staging_rows": 2**28}),
        ("staging_rows", {"staging_rows": 2**61}),
        ("graph_rows", {"graph_rows": 2**28}),
        ("max_staging_bytes", {"max_staging_bytes": 0}),
    ],
)
def test_interceptor_refuses_a_configuration(name: str, arguments: Arguments) -> None:
    expect_refusal(name, lambda: Interceptor(NworConfig(**arguments)), [])


def bind_arguments() -> Arguments:
    cache = (PAGES, TOKENS, HEADS, DIM)
    return {"name": "new", "key_cache": filled(*cache), "value_cache": filled(*cache), "group": 1}


BIND_KINDS = {
    # A dtype or channel stride that no kernel serves is a fallback with a reason, not wrong use.
    **{
        what: change
        for name in ("key_cache", "value_cache")
        for what, change in cache_kinds(name).items()
        if not what.endswith(("float64", "e5m2", "channel stride", "device"))
    },
    "group: negative": lambda a: {"group": -1},
    "group: too many": lambda a: {"group": 8},
    "group: of another shape": lambda a: {
        "key_cache": a["key_cache"][:, :, :1],
        "value_cache": a["value_cache"][:, :, :1],
        "group": 0,
    },
    "group: of another dtype": lambda a: {
        "key_cache": a["key_cache"].half(),
        "value_cache": a["value_cache"].half(),
        "group": 0,
    },
    "group: moved": lambda a: {"name": "layer0"},
    "dtype: not the cache's": lambda a: {"dtype": torch.float16},
    "dtype: missing for float8": lambda a: {
        "key_cache": a["key_cache"].to(torch.float8_e4m3fn),
        "value_cache": a["value_cache"].to(torch.float8_e4m3fn),
    },
    "dtype: not a model's": lambda a: {
        "key_cache": a["key_cache"].to(torch.float8_e4m3fn),
        "value_cache": a["value_cache"].to(torch.float8_e4m3fn),
        "dtype": torch.int32,
    },
    "k_scale: for a float32 cache": lambda a: {"k_scale": torch.ones(1)},
    "v_scale: for a float32 cache": lambda a: {"v_scale": torch.ones(1)},
}


@parametrize(BIND_KINDS)
def test_bind_layer_refuses(name: str, change: Change) -> None:
    engine = Engine(open_round=False)
    arguments = bind_arguments()
    names = {"group": "(group|key_cache)", "key_cache": "(key|value)_cache"}
    expect_refusal(
        names.get(name, name),
        lambda: engine.interceptor.bind_layer(**(arguments | change(arguments))),
        engine.caches + memory_of(arguments),
    )
    # The refused layer left nothing behind: a round with the two good ones still works.
    assert engine.interceptor.stats()["layers"] == LAYERS
    assert engine.interceptor.begin(RoundPlan([2], [1])).stage


@parametrize({**scale_kinds("k_scale"), **scale_kinds("v_scale")})
def test_bind_layer_refuses_scales(name: str, change: Change) -> None:
    engine = Engine(open_round=False)
    arguments = bind_arguments() | {"dtype": torch.float32}
    for cache in ("key_cache", "value_cache"):
        arguments[cache] = arguments[cache].to(torch.float8_e4m3fn)
    arguments |= {"k_scale": torch.ones(1), "v_scale": torch.ones(HEADS)}
    expect_refusal(
        name,
        lambda: engine.interceptor.bind_layer(**(arguments | change(arguments))),
        engine.caches,
    )


@pytest.mark.parametrize(
    ("name", "query_lens", "num_drafts", "parents"),
    [
        ("query_lens", [-1], [0], []),
        ("num_drafts", [3], [3], []),
        ("num_drafts", [3], [4], []),
        ("num_drafts", [3], [-1], []),
        ("num_drafts", [3, 2], [1], []),
        ("num_drafts", [0], [1], []),
        ("parents", [3], [2], [[0]]),
        ("parents", [3], [2], [[0, 0], [0]]),
        ("parents", [3], [2], [[0, 2]]),
        ("parents", [3], [2], [[-1, 0]]),
        ("parents", [4], [2], [[0, 1]]),
    ],
)
def test_begin_refuses_a_plan(name: str, query_lens, num_drafts, parents) -> None:
    engine = Engine(open_round=False)
    plan = RoundPlan(query_lens, num_drafts, parents)
    expect_refusal(name, lambda: engine.interceptor.begin(plan), engine.caches)
    assert not engine.interceptor.stats()["round_open"]


INTERCEPTOR_WRITE_KINDS = {
    **{k: c for k, c in rows_kinds("key").items() if "device" not in k},
    **{k: c for k, c in rows_kinds("value").items() if "device" not in k},
    **{k: c for k, c in index_kinds("slot_mapping", INT32).items() if "device" not in k},
    "slot_mapping: below -1": poke("slot_mapping", 0, -2),
    "slot_mapping: beyond the cache": poke("slot_mapping", 3, PAGES * TOKENS),
    "slot_mapping: beyond the cache, a draft": poke("slot_mapping", 2, PAGES * TOKENS),
    "slot_mapping: twice": poke("slot_mapping", 3, 1),
    "rows: beyond the batch": lambda a: {"rows": [0, 1, 2, 4]},
    "rows: negative": lambda a: {"rows": [0, 1, 2, -1]},
    "rows: twice": lambda a: {"rows": [0, 1, 2, 2]},
    "key: more rows than listed": lambda a: {"rows": [0, 1]},
}


@parametrize(INTERCEPTOR_WRITE_KINDS)
def test_write_refuses(name: str, change: Change) -> None:
    engine = Engine()
    arguments = engine.write_arguments()
    wrong = arguments | change(arguments)
    expect_refusal(
        names_an_argument_of(name, arguments),
        lambda: engine.interceptor.write(**wrong),
        engine.caches,
    )
    # The round goes on as if nothing had been said.
    assert engine.interceptor.write(**arguments).staged_rows == 2


def test_tensors_without_data_are_left_to_the_engine() -> None:
    for name in ("key", "value", "slot_mapping"):
        engine = Engine()
        arguments = engine.write_arguments()
        arguments[name] = arguments[name].to("meta")
        before = [as_bytes(cache) for cache in engine.caches]
        outcome = engine.interceptor.write(**arguments)
        assert (outcome.action, outcome.reason) == ("bypass", "fake_tensor")
        assert [as_bytes(cache) for cache in engine.caches] == before


INTERCEPTOR_COMMIT_KINDS = {
    **index_kinds("path", INT64),
    **index_kinds("counts", INT64),
    **index_kinds("slots", INT32),
    "path: depth": lambda a: {"path": a["path"][:, :1].contiguous()},
    "path: more than fits a commit": lambda a: {"path": torch.zeros(2, 5000, dtype=INT32)},
    "slots: one tensor too many": lambda a: {"slots": [a["slots"], a["slots"]]},
    "slots: numbers": lambda a: {"slots": [1, 2]},
    "rows: no such space": lambda a: {"rows": "tokens"},
    "counts: beyond the depth": poke("counts", 0, 3),
    "counts: negative": poke("counts", 1, -1),
    "path: beyond the batch": poke("path", (0, 1), 4),
    "path: negative": poke("path", (0, 0), -1),
    "path: the root": poke("path", (0, 0), 0),
    "path: a row of another request": lambda a: {
        "path": torch.tensor([[-1, -1], [1, -1]], dtype=INT32),
        "counts": ints(0, 1, dtype=INT32),
    },
    "path: not a chain": poke("path", (0, 0), 2),
    "path: upwards": lambda a: {"path": a["path"].flip(1)},
    "path: a row twice": poke("path", (0, 1), 1),
    "slots: negative": poke("slots", (0, 1), -1),
    "slots: beyond the cache": poke("slots", (0, 0), PAGES * TOKENS),
    "slots: twice": poke("slots", (0, 1), 2),
}


@parametrize(INTERCEPTOR_COMMIT_KINDS)
def test_interceptor_commit_refuses(name: str, change: Change) -> None:
    engine = Engine(stage=True)
    arguments = engine.commit_arguments()
    wrong = arguments | change(arguments)
    names = {"path": "(path|slots|counts)"}
    expect_refusal(names.get(name, name), lambda: engine.interceptor.commit(**wrong), engine.caches)
    # The round is still there, and commits.
    receipt = engine.interceptor.commit(**arguments)
    assert receipt.ok
    assert receipt.committed_tokens == 2


def test_calls_out_of_order_are_refused() -> None:
    closed = Engine(open_round=False)
    commit, write = closed.commit_arguments(), closed.write_arguments()
    no_commit = "commit: no round is open; call begin and write first"
    no_abort = "abort: no round is open; call begin first"
    no_write = f"write: no round is open for rows of layer '{write['layer']}'; call begin first"
    expect_message(no_commit, lambda: closed.interceptor.commit(**commit), closed.caches)
    expect_message(no_abort, closed.interceptor.abort, closed.caches)
    expect_message(no_write, lambda: closed.interceptor.write(**write), closed.caches)

    opened = Engine(stage=True)
    plan, caches = RoundPlan([1], [0]), opened.caches
    bind = bind_arguments()
    epoch = opened.interceptor.stats()["epoch"]
    is_open = f"round {epoch} is open; commit or abort it"
    expect_message(f"begin: {is_open} first", lambda: opened.interceptor.begin(plan), caches)
    expect_message(
        f"bind_layer: {is_open} before binding layer '{bind['name']}'",
        lambda: opened.interceptor.bind_layer(**bind),
        caches,
    )
    expect_message(
        f"set_enabled: {is_open} first", lambda: opened.interceptor.set_enabled(False), caches
    )
    opened.interceptor.commit(**commit)
    expect_message(no_write, lambda: opened.interceptor.write(**write), caches)
    expect_message(no_commit, lambda: opened.interceptor.commit(**commit), caches)
    expect_message(no_abort, opened.interceptor.abort, caches)


def test_a_late_write_of_an_old_round_is_refused() -> None:
    engine = Engine(open_round=False)
    old = engine.interceptor.begin(RoundPlan([3, 1], [2, 0])).epoch
    engine.interceptor.abort()
    before = [as_bytes(cache) for cache in engine.caches]
    outcome = engine.interceptor.write(**engine.write_arguments(), epoch=old)
    assert (outcome.action, outcome.reason) == ("bypass", "stale_round")
    engine.interceptor.begin(RoundPlan([3, 1], [2, 0]))
    outcome = engine.interceptor.write(**engine.write_arguments(), epoch=old)
    assert (outcome.action, outcome.reason) == ("bypass", "stale_round")
    assert [as_bytes(cache) for cache in engine.caches] == before


def test_strict_raises_where_others_fall_back() -> None:
    interceptor = Interceptor(NworConfig(strict=True))
    cache = (PAGES, TOKENS, HEADS, DIM)
    caches = [filled(*cache) for _ in range(2 * LAYERS)]
    interceptor.bind_layer("layer0", *caches[:2])
    interceptor.bind_layer("layer1", *caches[2:])
    interceptor.begin(RoundPlan([3, 1], [2, 0]))
    arguments = Engine.write_arguments()
    interceptor.write(**arguments)
    other = arguments | {"layer": "layer1", "slot_mapping": ints(1, 2, 4, 8, dtype=INT64)}
    before = [as_bytes(tensor) for tensor in caches]
    with pytest.raises(NworError, match="slot_mismatch"):
        interceptor.write(**other)
    with pytest.raises(NworError, match="unbound_layer"):
        interceptor.write(**(arguments | {"layer": "nobody"}))
    with pytest.raises(NworError, match="incomplete_staging"):
        interceptor.commit(**Engine.commit_arguments())
    assert [as_bytes(tensor) for tensor in caches] == before


# ---- ContractChecker, cache_views ----


def test_checker_refuses_calls_out_of_order() -> None:
    engine = Engine(open_round=False)
    checker = nwor_specpv.ContractChecker(engine.interceptor)
    no_snapshot = "checker: there is no snapshot; call snapshot first"
    expect_message(no_snapshot, checker.verify, engine.caches)
    expect_message(no_snapshot, checker.verify_staged, engine.caches)
    expect_refusal("page_size", lambda: checker.tell_request(0, 1, 1, 0), [])
    engine.interceptor.begin(RoundPlan([2], [1]))
    taken_late = "snapshot: a round is open; take the snapshot before begin"
    expect_message(taken_late, checker.snapshot, engine.caches)


@pytest.mark.parametrize(
    ("name", "shape", "layout"),
    [
        ("layout", (2, 4, 4, 2, 8), "diagonal"),
        ("kv_cache", (4, 4, 2, 8), "kv_first"),
        ("kv_cache", (3, 4, 4, 2, 8), "kv_first"),
        ("kv_cache", (4, 3, 4, 2, 8), "kv_second"),
        ("kv_cache", (4, 2, 4, 15), "packed"),
        ("kv_cache", (2, 4, 2, 4, 16), "packed"),
    ],
)
def test_cache_views_refuses(name: str, shape: tuple[int, ...], layout: str) -> None:
    expect_refusal(name, lambda: nwor_specpv.cache_views(torch.zeros(shape), layout), [])
