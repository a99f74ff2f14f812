"""Settings from mappings, files and the environment are checked alike."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from nwor_specpv import Interceptor, NworError
from nwor_specpv.config import ENV_PREFIX, Settings, load_config

OTHER = {
    "enable_nwor": False,
    "strict": True,
    "staging_rows": 17,
    "max_staging_bytes": 4096,
    "agreement_group": "tp",
    "attention_route": "flash_attn_3",
    "metrics_port": 9400,
    "metrics_host": "0.0.0.0",
    "check_contract": True,
    "draft_tree": 16,
    "enable_specpv": True,
    "specpv_block_size": 8,
    "specpv_n_sink_blocks": 3,
    "specpv_n_retrieval_blocks": 64,
    "specpv_n_window_blocks": 5,
    "specpv_n_spec_tokens_buf": 33,
    "specpv_partial_threshold": 9000,
    "specpv_full_refresh_interval": 12,
    "specpv_selector": "quest",
    "specpv_score": "specpv",
    "specpv_query_reduce": "last",
    "specpv_group_reduce": "max",
    "specpv_selection": "shared",
    "specpv_storage": "compact",
    "specpv_mode": "lossless",
    "specpv_budget": "adaptive",
    "specpv_offload": True,
    "specpv_draft_passes": 3,
    "specpv_draft_lookup": 0,
    "specpv_draft_sampling": "greedy",
    "specpv_draft_select_interval": 3,
    "specpv_max_requests": 2,
}


def as_environment(values: dict[str, Any]) -> dict[str, str]:
    names = {key: key.removeprefix("specpv_").upper() for key in values}
    return {f"{ENV_PREFIX}{names[key]}": str(value) for key, value in values.items()}


def test_defaults_are_those_of_the_library() -> None:
    config = Settings().nwor()
    fresh = type(config)()
    for name in (
        "enable_nwor",
        "strict",
        "staging_rows",
        "max_staging_bytes",
        "agreement_group",
    ):
        assert getattr(config, name) == getattr(fresh, name), name
    assert Settings().metrics_port is None
    assert Settings().metrics_host == "127.0.0.1"
    assert not Settings().check_contract


def test_the_example_names_every_key() -> None:
    assert set(OTHER) == {field.name for field in dataclasses.fields(Settings)}
    assert all(getattr(Settings(), key) != value for key, value in OTHER.items())


def test_every_source_sets_every_key(tmp_path: Path) -> None:
    as_json = tmp_path / "a.json"
    as_json.write_text(json.dumps(OTHER))
    as_yaml = tmp_path / "a.yaml"
    as_yaml.write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in OTHER.items()))
    expected = Settings(**OTHER)
    assert load_config(OTHER, env={}) == expected
    assert load_config(file=as_json, env={}) == expected
    assert load_config(file=str(as_yaml), env={}) == expected
    assert load_config(env=as_environment(OTHER)) == expected
    assert load_config(env={"PATH": "/bin"}) == Settings()
    assert expected.as_dict() == OTHER


def test_the_library_gets_what_was_set() -> None:
    config = Settings(**OTHER).nwor()
    for name in ("enable_nwor", "strict", "staging_rows", "max_staging_bytes", "agreement_group"):
        assert getattr(config, name) == OTHER[name], name
    assert Interceptor(Settings(enable_nwor=False).nwor()).mode == "disabled"


def test_the_mapping_beats_the_environment_and_both_beat_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"staging_rows": 1, "max_staging_bytes": 1, "strict": true}')
    env = as_environment({"staging_rows": 2, "max_staging_bytes": 2})
    settings = load_config({"staging_rows": 3}, file=file, env=env)
    assert settings == Settings(staging_rows=3, max_staging_bytes=2, strict=True)


@pytest.mark.parametrize("text", ["1", "true", "Yes", " ON "])
def test_the_environment_spells_true_in_several_ways(text: str) -> None:
    assert load_config(env={"NWOR_SPECPV_STRICT": text}).strict is True


@pytest.mark.parametrize("text", ["0", "false", "No", "off"])
def test_the_environment_spells_false_in_several_ways(text: str) -> None:
    assert load_config(env={"NWOR_SPECPV_ENABLE_NWOR": text}).enable_nwor is False


@pytest.mark.parametrize("text", ["", "none", "off", "null"])
def test_the_environment_switches_the_endpoint_off(text: str) -> None:
    assert load_config(env={"NWOR_SPECPV_METRICS_PORT": text}).metrics_port is None


def test_the_environment_knows_rows_and_words() -> None:
    assert load_config(env={"NWOR_SPECPV_DRAFT_TREE": " 32"}).draft_tree == 32
    assert load_config(env={"NWOR_SPECPV_DRAFT_TREE": "Off"}).draft_tree == "off"


WRONG = [
    ({"strict": 1}, "strict: got 1 (int), expected true or false"),
    ({"strict": "true"}, "strict: got 'true' (str), expected true or false"),
    ({"enable_nwor": None}, "enable_nwor: got None (NoneType), expected true or false"),
    ({"staging_rows": True}, "staging_rows: got True (bool), expected an integer of at least 0"),
    ({"staging_rows": -1}, "staging_rows: got -1 (int), expected an integer of at least 0"),
    ({"staging_rows": 1.0}, "staging_rows: got 1.0 (float), expected an integer of at least 0"),
    ({"max_staging_bytes": 0}, "max_staging_bytes: got 0 (int), expected an integer of at least 1"),
    ({"draft_tree": 1}, "draft_tree: got 1 (int), expected 'off', 'auto' or 2 to 256"),
    ({"draft_tree": "16"}, "draft_tree: got '16' (str), expected 'off', 'auto' or 2 to 256"),
    ({"draft_tree": True}, "draft_tree: got True (bool), expected 'off', 'auto' or 2 to 256"),
    ({"draft_tree": 257}, "draft_tree: got 257 (int), expected 'off', 'auto' or 2 to 256"),
    ({"agreement_group": 3}, "agreement_group: got 3 (int), expected a string"),
    ({"metrics_port": 65536}, "metrics_port: got 65536 (int), expected 0 to 65535, or none"),
    ({"metrics_port": "x"}, "metrics_port: got 'x' (str), expected 0 to 65535, or none"),
    ({"metrics_host": "a b"}, "metrics_host: got 'a b' (str), expected an IP address or localhost"),
    ({"metrics_host": "fe80::1%eth0"}, "metrics_host: got 'fe80::1%eth0' (str), expected an IP"),
    ({"metrics_host": "fe80::1%1"}, "metrics_host: got 'fe80::1%1' (str), expected an IP address"),
    ({"staging_rows": 1 << 63}, f"staging_rows: got {1 << 63} (int), expected an integer of at"),
]


@pytest.mark.parametrize(("values", "message"), WRONG)
def test_wrong_values_say_got_and_expected(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(NworError, match="^" + re.escape(message)):
        load_config(values, env={})
    with pytest.raises(NworError, match="^" + re.escape(message)):
        Settings(**values)
    file = tmp_path / "a.json"
    file.write_text(json.dumps(values))
    with pytest.raises(NworError, match="^" + re.escape(f"{file}: {message}")):
        load_config(file=file, env={})


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("STRICT", "maybe", "true or false"),
        ("STAGING_ROWS", "many", "an integer of at least 0"),
        ("STAGING_ROWS", "-3", "an integer of at least 0"),
        ("METRICS_PORT", "99999", "0 to 65535, or none"),
        ("METRICS_HOST", "nowhere", "an IP address or localhost"),
    ],
)
def test_wrong_variables_are_named(variable: str, text: str, expected: str) -> None:
    with pytest.raises(NworError, match=rf"^NWOR_SPECPV_{variable}: got .*, expected {expected}$"):
        load_config(env={f"NWOR_SPECPV_{variable}": text})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("staging_row", "staging_rows"),
        ("enable-nwor", "enable_nwor"),
        ("METRICS_PORT", "metrics_port"),
        ("port", "metrics_port"),
        ("MAX-STAGING-BYTES", "max_staging_bytes"),
    ],
)
def test_unknown_keys_name_the_nearest(tmp_path: Path, key: str, nearest: str) -> None:
    keys = ", ".join(OTHER)
    message = f"unknown key '{key}', expected one of {keys}; the nearest is '{nearest}'"
    with pytest.raises(NworError, match=f"^{re.escape(message)}$"):
        load_config({key: 1}, env={})
    file = tmp_path / "a.json"
    file.write_text(json.dumps({key: 1}))
    with pytest.raises(NworError, match=f"^{re.escape(f'{file}: {message}')}$"):
        load_config(file=file, env={})


def test_a_key_like_no_other_still_gets_a_name() -> None:
    with pytest.raises(NworError, match=f"the nearest is '({'|'.join(OTHER)})'$"):
        load_config({"": 1}, env={})


def test_unknown_variables_name_the_nearest() -> None:
    with pytest.raises(
        NworError,
        match=r"^unknown environment variable NWOR_SPECPV_STAGING_ROW, expected one of .*; "
        r"the nearest is 'NWOR_SPECPV_STAGING_ROWS'$",
    ):
        load_config(env={"NWOR_SPECPV_STAGING_ROW": "1"})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "not JSON: "),
        ("a.json", "[1]", "got .* expected a mapping of keys to values"),
        ("a.json", '{"strict": true, "strict": false}', "key 'strict' stands there twice"),
        (
            "a.yaml",
            "strict: true\nx: 1\nstrict: false",
            "key 'strict' stands there twice",
        ),
        ("a.yaml", "a: [1", "not YAML: "),
        ("a.yml", "- 1", "got .* expected a mapping of keys to values"),
        ("a.toml", "", "expected a name in .json, .yaml or .yml"),
        ("a.json", "\xff", "cannot be read"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path: Path, name: str, content: str, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(NworError, match=message) as caught:
        load_config(file=file, env={})
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_a_missing_file_is_an_error_and_an_empty_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(NworError, match=r"a\.json.* cannot be read"):
        load_config(file=tmp_path / "a.json", env={})
    empty = tmp_path / "a.yaml"
    empty.write_text("")
    assert load_config(file=empty, env={}) == Settings()


def test_yaml_without_pyyaml_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("strict: true")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(NworError, match="pip install pyyaml"):
        load_config(file=file, env={})


def test_a_mapping_is_wanted() -> None:
    with pytest.raises(NworError, match=r"^config: got \[1\] \(list\), expected a mapping"):
        load_config([1], env={})  # type: ignore[arg-type]
