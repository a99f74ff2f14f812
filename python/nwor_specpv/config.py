"""Settings from a mapping, a JSON or YAML file and the environment, checked alike.

    settings = load_config({"staging_rows": 512}, file="nwor.yaml")
    interceptor = Interceptor(settings.nwor())

The first of these places that has a key decides it: the mapping, the environment, the file, the
default. The variable of `staging_rows` is `NWOR_SPECPV_STAGING_ROWS`, that of `specpv_mode` is
`NWOR_SPECPV_MODE`. Unknown keys, wrong types and values out of range raise NworError naming the
place, what was got and what was expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import NworError

if TYPE_CHECKING:
    from . import _C

ENV_PREFIX = "NWOR_SPECPV_"

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_NONE = ("", "none", "null", "off")
_INT64_MAX = 2**63 - 1
_BLOCKS_MAX = 2**20
_TOKENS_MAX = 2**31
MOST_VIEWS = 4096  # of one vLLM engine


def _key(
    default: Any, doc: str, *, low: int = 0, high: int = _INT64_MAX, choices: tuple[str, ...] = ()
) -> Any:
    metadata = {"doc": doc, "low": low, "high": high, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """Everything that can be configured; each field is a key."""

    enable_nwor: bool = _key(True, "stage draft tokens and commit only accepted ones")
    strict: bool = _key(False, "raise instead of falling back")
    staging_rows: int = _key(256, "draft rows to reserve when the first round opens")
    max_staging_bytes: int = _key(1 << 30, "most memory staging may take, over all groups", low=1)
    agreement_group: str = _key("", "torch.distributed group whose ranks agree before a commit")
    attention_route: str = _key(
        "", "route of verify attention (status lists them); empty: automatic"
    )
    metrics_port: int | None = _key(
        None, "port of the Prometheus endpoint, plus the local rank; 0: any; none: off", high=65535
    )
    metrics_host: str = _key("127.0.0.1", "address the Prometheus endpoint listens at")
    check_contract: bool = _key(False, "verify the commit contract after every round (slow)")
    draft_tree: int | str = _key(
        "off",
        "vLLM: rows of the draft tree that a step verifies; auto: by the number of requests",
        low=2,
        high=256,
        choices=("off", "auto"),
    )

    enable_specpv: bool = _key(False, "verify long contexts over a partial view")
    specpv_block_size: int = _key(16, "tokens of a block; divides the page size", low=1, high=1024)
    specpv_n_sink_blocks: int = _key(2, "first blocks, always seen", high=_BLOCKS_MAX)
    specpv_n_retrieval_blocks: int = _key(256, "blocks chosen by score", high=_BLOCKS_MAX)
    specpv_n_window_blocks: int = _key(8, "latest blocks, always seen", high=_BLOCKS_MAX)
    specpv_n_spec_tokens_buf: int = _key(
        20, "tokens of the tail beyond the rows of one tree", high=_TOKENS_MAX
    )
    specpv_partial_threshold: int = _key(
        0, "context up to which every step is full", high=_TOKENS_MAX
    )
    specpv_full_refresh_interval: int = _key(
        0, "partial steps between full ones at most; 0: as many as the tail holds", high=_TOKENS_MAX
    )
    specpv_selector: str = _key(
        "specpv", "what a view consists of", choices=("specpv", "streaming", "sliding", "quest")
    )
    specpv_score: str = _key(
        "auto", "how blocks are scored; auto: by the selector", choices=("auto", "specpv", "quest")
    )
    specpv_query_reduce: str = _key(
        "mean", "over the rows of a tree", choices=("mean", "max", "last")
    )
    specpv_group_reduce: str = _key(
        "mean", "over the query heads of a KV head", choices=("mean", "max")
    )
    specpv_selection: str = _key(
        "per_head", "blocks for each KV head, or one list for all", choices=("per_head", "shared")
    )
    specpv_storage: str = _key(
        "paged", "block lists into the cache, or a copy", choices=("paged", "compact")
    )
    specpv_mode: str = _key(
        "rectify",
        "what a full step does to the tokens of partial ones",
        choices=("rectify", "refresh", "lossless"),
    )
    specpv_budget: str = _key(
        "fixed",
        "blocks to retrieve, for all requests alike or by length",
        choices=("fixed", "adaptive"),
    )
    specpv_offload: bool = _key(False, "the full cache lives in host memory; needs compact storage")
    specpv_draft_passes: int = _key(
        0, "vLLM, lossless: partial passes per full step; 0: as many as pay", high=128
    )
    specpv_draft_lookup: int = _key(
        4, "vLLM, lossless: tokens looked up in the text that a partial pass confirms", high=64
    )
    specpv_draft_sampling: str = _key(
        "auto",
        "vLLM, lossless: drafts of sampled requests; auto: sampled where memory allows",
        choices=("auto", "greedy", "sampled"),
    )
    specpv_draft_select_interval: int = _key(
        1,
        "vLLM, lossless without a head: partial passes after which blocks are chosen anew; 0: once",
        high=128,
    )
    specpv_max_requests: int = _key(
        0,
        "vLLM: requests at once that have views; 0: all",
        high=MOST_VIEWS,
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field.name, field, getattr(self, field.name))

    def nwor(self) -> _C.NworConfig:
        """The part the interceptor takes."""
        from . import _C

        config = _C.NworConfig()
        for name in ("enable_nwor", "strict", "staging_rows", "max_staging_bytes"):
            setattr(config, name, getattr(self, name))
        config.agreement_group = self.agreement_group
        return config

    def specpv(self) -> _C.SpecPVConfig:
        """The part partial verification takes, checked as a whole."""
        from . import _C

        names = [name for name in _FIELDS if hasattr(_C.SpecPVConfig, name)]
        return _C.SpecPVConfig(**{name: getattr(self, name) for name in names})

    def as_dict(self) -> dict[str, Any]:
        """Every setting by its name."""
        return dataclasses.asdict(self)


_FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


def load_config(
    mapping: Mapping[str, Any] | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] = os.environ,
) -> Settings:
    """Merges the sources and checks every value with the name of the place it came from."""
    values: dict[str, Any] = {}
    if file is not None:
        path = Path(file)
        values |= _checked(_read_file(path), f"{path}: ")
    values |= _read_environment(env)
    if mapping is not None:
        if not isinstance(mapping, Mapping):
            raise NworError(f"config: got {_kind(mapping)}, expected a mapping of keys to values")
        values |= _checked(mapping, "")
    return Settings(**values)


def _checked(mapping: Mapping[str, Any], where: str) -> dict[str, Any]:
    for key, value in mapping.items():
        if key not in _FIELDS:
            raise NworError(f"{where}unknown key {key!r}, {_nearest(str(key), _FIELDS)}")
        _check(f"{where}{key}", _FIELDS[key], value)
    return dict(mapping)


def variable_of(key: str) -> str:
    """The environment variable of a key: `NWOR_SPECPV_MODE` sets `specpv_mode`."""
    return f"{ENV_PREFIX}{key.removeprefix('specpv_').upper()}"


def _read_environment(env: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    names = {variable_of(key): key for key in _FIELDS}
    for variable, text in env.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        if variable not in names:
            raise NworError(f"unknown environment variable {variable}, {_nearest(variable, names)}")
        field = _FIELDS[names[variable]]
        value = _parse(field, text)
        _check(variable, field, value)
        values[field.name] = value
    return values


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NworError(f"config file: got {str(path)!r}, which cannot be read: {error}") from None
    if path.suffix == ".json":
        try:
            content = json.loads(text, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise NworError(f"{path}: not JSON: {error}") from None
    elif path.suffix in (".yaml", ".yml"):
        content = _parse_yaml(path, text)
    else:
        raise NworError(f"config file: got {str(path)!r}, expected a name in .json, .yaml or .yml")
    if content is None:  # an empty YAML file
        return {}
    if not isinstance(content, Mapping):
        raise NworError(f"{path}: got {_kind(content)}, expected a mapping of keys to values")
    return content


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping of pairs, each key once: a second one would undo the first in silence."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} stands there twice")
        found[key] = value
    return found


def _parse_yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise NworError(
            f"{path}: reading YAML needs PyYAML: pip install pyyaml, or write the file as JSON"
        ) from None

    class Loader(yaml.SafeLoader):
        """YAML's own takes the last of several equal keys."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            if isinstance(node, yaml.MappingNode):
                scalars = (key for key, _ in node.value if isinstance(key, yaml.ScalarNode))
                _once((key.value, None) for key in scalars)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    # Its constructors let through what dates and numbers that are none raise.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise NworError(f"{path}: not YAML: {' '.join(str(error).split())}") from None


def _parse(field: dataclasses.Field[Any], text: str) -> Any:
    """An environment variable's text as the key's type; text that fits no type stays text."""
    word = text.strip().lower()
    kind = str(field.type)
    if kind == "bool" and word in _TRUE + _FALSE:
        return word in _TRUE
    if kind.endswith("None") and word in _NONE:
        return None
    if kind.startswith("int") and word not in field.metadata["choices"]:
        try:
            return int(word)
        except ValueError:
            return text
    return word if field.metadata["choices"] else text


def _check(name: str, field: dataclasses.Field[Any], value: Any) -> None:
    kind = str(field.type)
    low, high = field.metadata["low"], field.metadata["high"]
    if kind == "bool":
        expected, fits = "true or false", isinstance(value, bool)
    elif field.metadata["choices"] and kind.startswith("int"):
        choices = field.metadata["choices"]
        expected = f"{', '.join(map(repr, choices))} or {low} to {high}"
        fits = value in choices if isinstance(value, str) else _is_within(value, low, high)
    elif field.metadata["choices"]:
        choices = field.metadata["choices"]
        expected = f"one of {', '.join(map(repr, choices))}"
        fits = isinstance(value, str) and value in choices
    elif kind == "str":
        expected, fits = "a string", isinstance(value, str)
    else:
        span = f"an integer of at least {low}" if high == _INT64_MAX else f"{low} to {high}"
        expected = span
        fits = _is_within(value, low, high)
        if kind.endswith("None"):
            expected, fits = f"{span}, or none", fits or value is None
    if fits and field.name == "metrics_host":
        expected, fits = "an IP address or localhost", _is_host(value)
    if not fits:
        raise NworError(f"{name}: got {_kind(value)}, expected {expected}")


def _is_within(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def metrics_url(host: str, port: int) -> str:
    """Where this machine reaches an endpoint that listens at `host`."""
    if host != "localhost":
        address = ipaddress.ip_address(host)
        if (getattr(address, "ipv4_mapped", None) or address).is_unspecified:
            host = "127.0.0.1"  # one of all that it listens at
    return f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"


def _is_host(text: str) -> bool:
    """Whether the endpoint can bind it, which knows no scope ids."""
    if text == "localhost":
        return True
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text


def _nearest(name: str, valid: Mapping[str, Any]) -> str:
    folded = {key.lower(): key for key in valid}
    word = name.lower().replace("-", "_")
    (closest,) = difflib.get_close_matches(word, list(folded), n=1, cutoff=0.0)
    return f"expected one of {', '.join(valid)}; the nearest is {folded[closest]!r}"


def _kind(value: Any) -> str:
    """`'abc' (str)`; only the type where the value may be long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return type(value).__name__
    return f"{text} ({type(value).__name__})" if len(text) <= 60 else type(value).__name__
