"""SpecPVConfig: the names users type, in Python as in files, checked at once and as a whole."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

from nwor_specpv import NworError, Settings, SpecPVConfig, load_config

# What only the vLLM plugin asks is no business of the library.
VLLM_ONLY = {
    "draft_tree",
    "specpv_draft_passes",
    "specpv_draft_lookup",
    "specpv_draft_sampling",
    "specpv_draft_select_interval",
    "specpv_max_requests",
}
KEYS = [
    key
    for key in Settings().as_dict()
    if (key.startswith("specpv_") or key == "enable_specpv") and key not in VLLM_ONLY
]


def test_settings_and_library_have_the_same_names_and_defaults() -> None:
    config, settings = SpecPVConfig(), Settings()
    members = {n for n in dir(config) if n.startswith("specpv_") or n == "enable_specpv"}
    assert members == set(KEYS)
    assert {key: getattr(config, key) for key in KEYS} == {
        key: getattr(settings, key) for key in KEYS
    }


def test_every_choice_of_the_settings_is_one_of_the_library() -> None:
    for key, field in Settings.__dataclass_fields__.items():
        for choice in field.metadata["choices"] if key not in VLLM_ONLY else ():
            assert getattr(SpecPVConfig(**{key: choice}), key) == choice


def other_values() -> dict[str, Any]:
    """Every key with something that is not its default, and that fits the others."""
    values: dict[str, Any] = {}
    for key, default in Settings().as_dict().items():
        if key not in KEYS:
            continue
        choices = Settings.__dataclass_fields__[key].metadata["choices"]
        if isinstance(default, bool):
            values[key] = not default
        elif isinstance(default, int):
            values[key] = default + 7
        else:
            values[key] = next(choice for choice in reversed(choices) if choice != default)
    return values


def test_all_sources_give_the_same_configuration(tmp_path: Path) -> None:
    values = other_values()
    assert set(values) == set(KEYS)
    (tmp_path / "a.json").write_text(json.dumps(values))
    (tmp_path / "a.yaml").write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in values.items()))
    env = {"NWOR_SPECPV_" + k.removeprefix("specpv_").upper(): str(v) for k, v in values.items()}
    sources: list[Settings] = [
        load_config(values, env={}),
        load_config(file=tmp_path / "a.json", env={}),
        load_config(file=tmp_path / "a.yaml", env={}),
        load_config(env=env),
    ]
    direct = SpecPVConfig(**values)
    for settings in sources:
        config = settings.specpv()
        assert {key: getattr(config, key) for key in values} == values
        assert {key: getattr(direct, key) for key in values} == values
    defaults = SpecPVConfig()
    assert all(getattr(defaults, key) != value for key, value in values.items())


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"specpv_mode": "exact"}, "specpv_mode: got 'exact'"),
    ({"specpv_block_size": 0}, "specpv_block_size: got 0"),
    ({"specpv_n_window_blocks": -1}, "specpv_n_window_blocks: got -1"),
    ({"specpv_selector": 3}, "specpv_selector: got 3"),
    ({"specpv_block_size": "16"}, "specpv_block_size: got '16'"),
    ({"specpv_block_size": True}, "specpv_block_size: got True"),
    ({"specpv_block_size": 16.0}, "specpv_block_size: got 16.0"),
    ({"specpv_block_size": 2**70}, "specpv_block_size: got 1180591620717411303424"),
    ({"enable_specpv": None}, "enable_specpv: got None"),
    ({"enable_specpv": 2}, "enable_specpv: got 2"),
    ({"enable_specpv": 0.0}, "enable_specpv: got 0.0"),
    ({"specpv_selector": b"quest"}, "specpv_selector: got b'quest'"),
]


@pytest.mark.parametrize(("values", "message"), WRONG)
def test_wrong_values_are_named(values: dict[str, Any], message: str) -> None:
    for make in (SpecPVConfig, lambda **v: load_config(v, env={})):
        with pytest.raises(NworError) as caught:
            make(**values)
        assert str(caught.value).startswith(message)
        assert "expected" in str(caught.value)


@pytest.mark.parametrize(("values", "message"), WRONG[5:])
def test_wrong_types_are_named_when_they_are_assigned(values: dict[str, Any], message: str) -> None:
    config = SpecPVConfig()
    ((name, value),) = values.items()
    before = getattr(config, name)
    with pytest.raises(NworError, match=f"^{re.escape(message)}, expected"):
        setattr(config, name, value)
    assert getattr(config, name) == before


def test_numbers_of_thousands_of_digits_and_fractions_are_named() -> None:
    for value in (10**5000, torch.tensor(16.5), Decimal("16.5")):
        with pytest.raises(NworError, match=r"^specpv_block_size: got .*, expected an integer"):
            SpecPVConfig(specpv_block_size=value)
    with pytest.raises(NworError, match=r"^specpv_block_size: got int, expected 1 to 1024"):
        load_config({"specpv_block_size": 10**5000}, env={})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", "specpv_block_size: 2001-99-99", "not YAML: "),
        ("a.yaml", "specpv_block_size: !!int ''", "not YAML: "),
        ("a.yaml", "specpv_block_size: !!timestamp soon", "not YAML: "),
        ("a.yaml", "specpv_block_size: " + "[" * 5000, "not YAML: "),
        ("a.yaml", "specpv_block_size: 0x" + "f" * 5000, "specpv_block_size: got int"),
        ("a.json", '{"specpv_block_size": ' + "9" * 5000 + "}", "not JSON: "),
        ("a.json", '{"specpv_block_size": ' + "[" * 100000, "not JSON: "),
    ],
)
def test_files_that_parsers_stumble_over_are_named(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(NworError) as caught:
        load_config(file=path, env={})
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["specpv_blocksize", "budget", "validate"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(NworError, match=f"unknown name '{name}'"):
        SpecPVConfig(**{name: 16})


def test_keys_that_do_not_fit_each_other_are_refused_when_used() -> None:
    settings = load_config({"specpv_offload": True}, env={})
    with pytest.raises(NworError, match=r"^specpv_offload: got true .* expected 'compact'"):
        settings.specpv()


def test_an_engine_that_does_not_fit_is_told_the_numbers() -> None:
    config = SpecPVConfig(enable_specpv=True)
    config.validate_for(page_size=16, max_rows=64, max_context=32768)
    for arguments, numbers in (
        ({"page_size": 24, "max_rows": 64, "max_context": 32768}, ("16", "24")),
        ({"page_size": 16, "max_rows": 64, "max_context": 4000}, ("4256", "4000")),
        (
            {"page_size": 16, "max_rows": 64, "max_context": 32768, "tail_capacity": 63},
            ("63", "64"),
        ),
    ):
        with pytest.raises(NworError) as caught:
            config.validate_for(**arguments)
        assert all(number in str(caught.value) for number in numbers), caught.value


def test_budgets() -> None:
    budget = SpecPVConfig().budget(max_rows=60)
    assert (budget.static_tokens, budget.tail_capacity) == (4256, 80)
    adaptive = SpecPVConfig(specpv_budget="adaptive")
    assert adaptive.budget(1, prompt_tokens=16000, max_new_tokens=384).retrieval_blocks == 128
    for rows in (0, 2**31, 2**63 - 1):
        with pytest.raises(NworError, match=f"max_rows: got {rows}, expected"):
            adaptive.budget(rows)
    endless = adaptive.budget(1, prompt_tokens=2**63 - 1, max_new_tokens=2**63 - 1)
    assert endless.retrieval_blocks == 256


def test_an_adaptive_budget_of_a_view_without_a_window_has_a_block() -> None:
    config = SpecPVConfig(
        specpv_budget="adaptive", specpv_selector="quest", specpv_n_window_blocks=0
    )
    assert config.budget(1).retrieval_blocks == 1
    assert config.budget(1, prompt_tokens=1024).retrieval_blocks == 8


def test_the_configured_numbers_are_those_of_the_message() -> None:
    with pytest.raises(
        NworError,
        match=r"^specpv_n_retrieval_blocks: got 256, of which an adaptive budget has 8 at least "
        r"\(with 2 sink and 8 window blocks of 16 tokens a view of 288 tokens\), expected",
    ):
        SpecPVConfig(specpv_budget="adaptive").validate_for(16, 4, 200)
    with pytest.raises(
        NworError,
        match=r"^specpv_selector: got 'streaming' \(with 2 sink and 8 window blocks of 16 tokens a "
        r"view of 160 tokens\), expected",
    ):
        SpecPVConfig(specpv_selector="streaming").validate_for(16, 4, 100)
