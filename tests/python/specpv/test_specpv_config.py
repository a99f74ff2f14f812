"""SpecPVConfig: the names users type, in Python as in files, checked at once and as a whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nwor_specpv import NworError, Settings, SpecPVConfig, load_config

# What only the vLLM plugin asks is no business of the library.
VLLM_ONLY = {
    "specpv_draft_passes",
    "specpv_draft_lookup",
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
        for choice in field.metadata["choices"]:
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
    env = {f"NWOR_SPECPV_{k.upper()}": str(v) for k, v in values.items()}
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
    ({"specpv_rectify": "exact"}, "specpv_rectify: got 'exact'"),
    ({"specpv_block_size": 0}, "specpv_block_size: got 0"),
    ({"specpv_n_window_blocks": -1}, "specpv_n_window_blocks: got -1"),
    ({"specpv_selector": 3}, "specpv_selector: got 3"),
    ({"specpv_block_size": "16"}, "specpv_block_size: got '16'"),
]


@pytest.mark.parametrize(("values", "message"), WRONG)
def test_wrong_values_are_named(values: dict[str, Any], message: str) -> None:
    for make in (SpecPVConfig, lambda **v: load_config(v, env={})):
        with pytest.raises(NworError) as caught:
            make(**values)
        assert str(caught.value).startswith(message)
        assert "expected" in str(caught.value)


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
