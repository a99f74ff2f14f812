"""The engine in C++ (examples/engine): built as its page says, the same tokens as the host."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import nwor_specpv
from nwor_specpv import NworError, SpecPVConfig
from nwor_specpv.drafters import TreeConfig
from nwor_specpv.drafters.eagle3 import SHIPPED, Eagle3Drafter
from nwor_specpv.drafters.eagle3_head import Eagle3Head, HeadShape
from nwor_specpv.models import smollm2
from nwor_specpv.models.weights import load_weights, save_weights
from nwor_specpv.transformers import Generator
from tests.python.transformers.tiny_models import VOCAB, clear_prompt, tiny

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "examples" / "engine"
NEW_TOKENS = 24
TREE = TreeConfig(rows=8)
# Small enough that most steps over these prompts are partial.
VIEW = {
    "enable_specpv": True,
    "specpv_block_size": 8,
    "specpv_n_sink_blocks": 1,
    "specpv_n_retrieval_blocks": 2,
    "specpv_n_window_blocks": 1,
    "specpv_n_spec_tokens_buf": 8,
}

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine, built as docs/cpp.md says, but all files at once: a third of the time."""
    folder = tmp_path_factory.mktemp("engine")
    own = Path(sys.executable).parent
    path = os.pathsep.join([str(own), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=path) or "cmake"
    configure = [cmake, "-S", str(SOURCE), "-B", str(folder)]
    configure += [f"-Dnwor_specpv_DIR={nwor_specpv.get_cmake_dir()}", "-DCMAKE_CXX_FLAGS=-Werror"]
    configure += ["-DCMAKE_UNITY_BUILD=ON"]
    if shutil.which("ccache"):
        configure += ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"]
    for command in (configure, [cmake, "--build", str(folder), "-j2"]):
        done = subprocess.run(
            command, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=1800
        )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return folder / "engine"


@pytest.fixture
def run(program: Path, tmp_path: Path) -> Run:
    """Runs the engine over a model and prompts; keywords are its options."""

    def call(model: Path, prompts: Any, **options: object) -> subprocess.CompletedProcess[str]:
        ids = tmp_path / "ids.json"
        ids.write_text(prompts if isinstance(prompts, str) else json.dumps(prompts))
        given: dict[str, object] = {"model": model, "ids": ids, "out": tmp_path / "out.json"}
        command = [str(program)]
        for key, value in (given | options).items():
            if value is not None:
                text = str(value).lower() if isinstance(value, bool) else str(value)
                command += [f"--{key.replace('_', '-')}", text]
        return subprocess.run(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )

    return call


@cache
def model_of(family: str) -> PreTrainedModel:
    return tiny(family, max_position_embeddings=8192)


@cache
def prompts_of(family: str, count: int = 20) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and how they go on by choices that no rounding decides."""
    rng, model = random.Random(11), model_of(family)
    pairs = [clear_prompt(model, rng, 3, 80, NEW_TOKENS) for _ in range(count)]
    return [prompt for prompt, _ in pairs], [truth for _, truth in pairs]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model, with an untrained EAGLE3 head in it."""
    made: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            model_of(family).save_pretrained(made[family])
            head_of(family).save(made[family] / "head.safetensors")
        return made[family]

    return folder_of


def head_of(family: str) -> Eagle3Head:
    text = model_of(family).config
    shape = HeadShape(
        hidden=text.hidden_size,
        intermediate=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        target_vocabulary=VOCAB,
        feature_layers=(0, 2),
        window=24,
        rope_theta=10000.0,
        norm_epsilon=1e-5,
    )
    rng = torch.Generator().manual_seed(3)
    weights = {
        name: torch.ones(size) if name.endswith("norm") else 0.4 * torch.randn(size, generator=rng)
        for name, size in shape.sizes().items()
    }
    return Eagle3Head(shape, weights, torch.randperm(VOCAB, generator=rng)[:64])


def result_of(done: subprocess.CompletedProcess[str], folder: Path) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "out.json").read_text())
    assert result["stats"]["violations"] == 0
    return result


def test_it_can_be_read_in_an_hour() -> None:
    files = [*SOURCE.glob("*.cpp"), *SOURCE.glob("*.h")]
    assert 0 < sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) < 1500


# ---- the same tokens as the host ----

EXACT = {
    "plain": {},
    "ngram": {"method": "ngram"},
    "eagle3": {"method": "eagle3"},
    "lossless": {"method": "ngram", "specpv_mode": "lossless", **VIEW},
    "lossless eagle3": {"method": "eagle3", "specpv_mode": "lossless", **VIEW},
    "lossless without drafts": {"specpv_mode": "lossless", **VIEW},
}


@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", pytest.param("qwen3", marks=pytest.mark.slow)]
)
def test_exact_modes_say_what_the_host_says(
    run: Run, folders: Callable[[str], Path], tmp_path: Path, family: str, mode: str
) -> None:
    """20 prompts, three places: requests join and leave, and prompts run in pieces."""
    prompts, truths = prompts_of(family)
    folder, options = folders(family), EXACT[mode]
    if options.get("method") == "eagle3":
        options = options | {"head": folder / "head.safetensors"}
    done = run(
        folder,
        prompts,
        max_new_tokens=NEW_TOKENS,
        max_batch_size=3,
        prefill_rows=32,
        check_contract=True,
        **options,
    )
    result = result_of(done, tmp_path)
    host = Generator(model_of(family), drafter="none")
    assert result["token_ids"] == host.generate(prompts, max_new_tokens=NEW_TOKENS).token_ids
    assert result["token_ids"] == truths
    assert set(result["finish"]) == {"length"}
    assert result["stats"]["largest_batch"] == 3
    assert ("partial" in result["stats"]["step_kinds"]) == ("specpv_mode" in options)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("mode", [None, "rectify", "refresh", "lossless"])
def test_every_step_is_the_host_s(
    run: Run, folders: Callable[[str], Path], tmp_path: Path, mode: str | None, temperature: float
) -> None:
    """The same trees, views and coins: the lossy modes and sampling agree too."""
    prompts = prompts_of("llama", 6)[0]
    view = {} if mode is None else VIEW | {"specpv_mode": mode}
    host = Generator(
        model_of("llama"),
        drafter="ngram",
        specpv=SpecPVConfig(**view) if view else None,
        pace=False,
    )
    wanted = host.generate(
        prompts, max_new_tokens=NEW_TOKENS, temperature=temperature, top_k=20, seed=4, tree=TREE
    )
    done = run(
        folders("llama"),
        prompts,
        method="ngram",
        tree_rows=TREE.rows,
        max_new_tokens=NEW_TOKENS,
        temperature=temperature,
        top_k=20,
        seed=4,
        **view,
    )
    result = result_of(done, tmp_path)
    assert result["token_ids"] == wanted.token_ids
    assert result["stats"]["step_kinds"] == wanted.stats.step_kinds
    assert result["stats"]["drafts"] == wanted.stats.drafts
    assert result["stats"]["cut_tokens"] == wanted.stats.cut_tokens


def test_the_head_drafts_what_the_host_s_drafts(
    run: Run, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    prompts, folder = prompts_of("llama", 6)[0], folders("llama")
    model = model_of("llama")
    drafter = Eagle3Drafter(
        Eagle3Head.load(folder / "head.safetensors"),
        model.get_input_embeddings().weight,
        model.get_output_embeddings().weight,
        own_tokens=0,
    )
    wanted = Generator(model, drafter=drafter).generate(prompts, NEW_TOKENS, tree=TREE)
    done = run(
        folder,
        prompts,
        method="eagle3",
        head=folder / "head.safetensors",
        max_new_tokens=NEW_TOKENS,
    )
    stats = result_of(done, tmp_path)["stats"]
    assert stats["drafts"] == wanted.stats.drafts > 0
    assert stats["accepted"] == wanted.stats.accepted


def test_a_text_ends_at_its_stop_token(
    run: Run, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    prompts, truths = prompts_of("llama", 4)
    folder = tmp_path / "model"
    shutil.copytree(folders("llama"), folder)
    stop = truths[0][5]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    done = run(folder, prompts, method="ngram", max_new_tokens=NEW_TOKENS)
    result = result_of(done, tmp_path)
    for said, truth in zip(result["token_ids"], truths, strict=True):
        assert said == (truth[: truth.index(stop) + 1] if stop in truth else truth)
    assert result["finish"][0] == "stop"


TOPICS = ["the sky", "bread", "mountains", "bees", "a guitar", "the sea", "sleep", "newspapers"]


def smollm2_chats() -> tuple[Path, list[list[int]]]:
    """The folder of SmolLM2, and prompts for it."""
    try:
        folder = smollm2()
    except NworError as error:
        pytest.skip(f"SmolLM2-135M-Instruct is not here: {error}")
    texts = [f"Tell me about {topic}." for topic in TOPICS]
    command = [sys.executable, str(SOURCE / "ids.py"), "encode", str(folder), *texts]
    told = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return folder, json.loads(told.stdout)


@pytest.mark.slow
def test_smollm2_says_what_the_host_says(run: Run, tmp_path: Path) -> None:
    folder, prompts = smollm2_chats()
    host = Generator(folder, drafter="none")
    wanted = host.generate(prompts, max_new_tokens=48).token_ids
    for options in ({}, {"method": "ngram"}, {"method": "eagle3", "head": SHIPPED}):
        result = result_of(run(folder, prompts, max_new_tokens=48, **options), tmp_path)
        assert result["token_ids"] == wanted, options
    assert result["stats"]["accepted"] > result["stats"]["new_tokens"] / 3
    command = [sys.executable, str(SOURCE / "ids.py"), "decode", str(folder)]
    command += [str(tmp_path / "out.json")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert told.stdout.count("--- prompt ") == len(TOPICS)


GRAPHED = {
    "plain": {},
    "ngram": {"method": "ngram"},
    "eagle3": {"method": "eagle3", "head": SHIPPED},
    "lossless": {"method": "ngram", "specpv_mode": "lossless", **VIEW, "specpv_block_size": 16},
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", GRAPHED)
def test_graphs_change_no_token(run: Run, tmp_path: Path, mode: str) -> None:
    """Steps of few and of many rows: requests join and leave, prompts run beside drafts."""
    folder, prompts = smollm2_chats()
    given = {"device": "cuda", "max_new_tokens": 96, "max_batch_size": 3, "ignore_eos": True}
    plain, graphed = (
        result_of(run(folder, prompts, cuda_graphs=on, **given, **GRAPHED[mode]), tmp_path)
        for on in (False, True)
    )
    assert graphed["token_ids"] == plain["token_ids"]
    assert graphed["stats"]["steps"] == plain["stats"]["steps"]
    assert ("partial" in graphed["stats"]["step_kinds"]) == (mode == "lossless")


# ---- the contract ----


def test_after_a_violation_plain_decoding_goes_on(
    run: Run, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    prompts, truths = prompts_of("llama", 4)
    options = EXACT["lossless"] | {"max_new_tokens": NEW_TOKENS, "check_contract": True}
    done = run(folders("llama"), prompts, cache_tokens=1024, break_contract=9, **options)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("engine: speculation ends, plain decoding goes on: contract C2: ")
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["token_ids"] == truths
    assert result["stats"]["violations"] == 1
    assert result["stats"]["speculation_ended"] in line


def test_drafts_that_cannot_be_staged_end_speculation(
    run: Run, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    prompts, truths = prompts_of("llama", 4)
    done = run(
        folders("llama"), prompts, method="ngram", max_new_tokens=NEW_TOKENS, max_staging_bytes=1
    )
    result = result_of(done, tmp_path)
    assert result["token_ids"] == truths
    assert "drafts cannot be staged" in result["stats"]["speculation_ended"]
    assert result["stats"]["accepted"] == 0


# ---- settings from files ----

YAML = """
max_new_tokens: 24
speculative_config:
  enable_speculative_decoding: true
  method: eagle3
  enable_target_tree: true
  model: {head}          # where the head is
  enable_specpv: true
  specpv_block_size: 16
  specpv_n_sink_blocks: 2
  specpv_n_retrieval_blocks: 256
  specpv_n_window_blocks: 8
  specpv_n_spec_tokens_buf: 128
  specpv_partial_threshold: 4096
  specpv_full_refresh_interval: 32
"""
JSON = """
{{"max_new_tokens": 24, "enable_speculative_decoding": true, "spec_method": "eagle3",
 "speculative_config": {{"enable_eagle_target_tree": true, "model": "{head}",
 "enable_specpv": true, "specpv_block_size": 16, "specpv_n_sink_blocks": 2,
 "specpv_n_retrieval_blocks": 256, "specpv_n_window_blocks": 8, "specpv_n_spec_tokens_buf": 128,
 "specpv_partial_threshold": 4096, "specpv_full_refresh_steps": 32}}}}
"""


@pytest.mark.parametrize(("name", "text"), [("a.yaml", YAML), ("a.yml", YAML), ("a.json", JSON)])
def test_files_of_other_engines_load(
    run: Run, folders: Callable[[str], Path], tmp_path: Path, name: str, text: str
) -> None:
    prompts, truths = prompts_of("llama", 2)
    folder = folders("llama")
    (tmp_path / name).write_text(text.format(head=folder / "head.safetensors"))
    result = result_of(run(folder, prompts, config=tmp_path / name), tmp_path)
    assert result["token_ids"] == truths
    assert result["stats"]["drafts"] > 0
    assert result["stats"]["step_kinds"] == {}  # a view would cover these short contexts


@pytest.mark.parametrize("key", ["enable_speculative_decoding", "enable_eagle_target_tree"])
def test_a_switch_turns_drafts_off(
    run: Run, folders: Callable[[str], Path], tmp_path: Path, key: str
) -> None:
    """An option of the command line wins over the file."""
    prompts, truths = prompts_of("llama", 2)
    (tmp_path / "a.yaml").write_text("speculative_config: {method: ngram}\nmax_new_tokens: 5\n")
    options = {key: False, "config": tmp_path / "a.yaml", "max_new_tokens": NEW_TOKENS}
    result = result_of(run(folders("llama"), prompts, **options), tmp_path)
    assert result["token_ids"] == truths
    assert result["stats"]["drafts"] == 0


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "speculative_config: {specpv_blocks: 3}", "unknown key 'specpv_blocks'"),
        ("a.json", '{"max_token": 3}', "unknown key 'max_token', expected one of break"),
        ("a.yaml", "max_new_tokens: many", 'max_new_tokens: got "many", expected a whole number'),
        ("a.yaml", "max_new_tokens: 0", "max_new_tokens: got 0, expected a whole number, 1 to"),
        ("a.yaml", "max_new_tokens: 1.5", "max_new_tokens: got 1.5, expected"),
        ("a.yaml", "check_contract: 3", "check_contract: got 3, expected true or false"),
        ("a.yaml", "top_p: 2", "top_p: got 2, expected a number"),
        ("a.yaml", "specpv_mode: fast", "specpv_mode: got 'fast', expected one of 'rectify'"),
        ("a.yaml", "method: magic", "method: got 'magic', expected one of 'none', 'ngram',"),
        ("a.yaml", "seed: 1\nseed: 2", "seed: stands there twice"),
        ("a.json", '{"seed": 1, "seed": 2}', "seed: stands there twice"),
        ("a.yaml", "method: ngram\nspec_method: ngram", "spec_method: stands there twice"),
        ("a.yaml", "speculative_config: 3", "speculative_config: got no mapping"),
        ("a.yaml", "seed: [1]", "seed: got no single value"),
        ("a.yaml", "a: b: c", "not YAML"),
        ("a.json", "{", "not JSON"),
        ("a.yaml", "{enable_specpv: true, specpv_block_size: 24}", "specpv_block_size: got 24"),
        (
            "a.yaml",
            "{method: ngram, enable_specpv: true, specpv_n_spec_tokens_buf: 300}",
            "specpv_n_spec_tokens_buf: got 300 beside trees of 8 rows",
        ),
    ],
)
def test_wrong_settings_are_one_line(
    run: Run, folders: Callable[[str], Path], tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    assert_refused(run(folders("llama"), [[1]], config=tmp_path / name), tmp_path, said)


# ---- what goes wrong ----


def assert_refused(done: subprocess.CompletedProcess[str], folder: Path, said: str) -> None:
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("engine: ")
    assert said in line
    assert done.stdout == ""
    assert not list(folder.glob("out.json*"))


@pytest.mark.parametrize(
    ("options", "prompts", "said"),
    [
        ({"model": None}, [[1]], "--model: got none"),
        ({"model": "nowhere"}, [[1]], "--model: got 'nowhere', expected a folder"),
        ({"ids": None}, [[1]], "--ids: got none"),
        ({"ids": "nowhere.json"}, [[1]], "nowhere.json: cannot be read"),
        ({"config": "nowhere.yaml"}, [[1]], "nowhere.yaml: cannot be read"),
        ({"wrong": 3}, [[1]], "unknown key 'wrong'"),
        ({}, "{", "not JSON"),
        ({}, [], "expected a list of prompts"),
        ({}, [1, 2], "expected a list of prompts"),
        ({}, [[1.5]], "expected a list of prompts"),
        ({}, [[1], []], "prompt 1: got no tokens"),
        ({}, [[1, VOCAB]], f"prompt 0: got token {VOCAB}, expected ids from 0 to {VOCAB - 1}"),
        ({}, [[-1]], "prompt 0: got token -1"),
        ({"max_new_tokens": 8192}, [[1]], "8192 together at most"),
        ({"cache_tokens": 64}, [[1]], "cache_tokens: got 64, expected 144 or more"),
        (
            {"cache_tokens": 1 << 34},
            [[1]],
            "cache_tokens: got 17179869184, which take 12288 GiB, more than",
        ),
        ({"device": "tpu"}, [[1]], "device: got 'tpu', expected cpu, cuda"),
        ({"method": "eagle3"}, [[1]], "head: got none"),
        ({"method": "eagle3", "head": "nowhere"}, [[1]], "nowhere: cannot be read"),
        ({"out": "nowhere/out.json"}, [[1]], "--out: 'nowhere/out.json' cannot be written"),
    ],
)
def test_wrong_input_is_one_line(
    run: Run,
    folders: Callable[[str], Path],
    tmp_path: Path,
    options: dict[str, Any],
    prompts: Any,
    said: str,
) -> None:
    given = {"model": folders("llama")} | options
    assert_refused(run(given.pop("model"), prompts, **given), tmp_path, said)


def test_without_a_gpu_cuda_is_one_line(
    run: Run, folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run(folders("llama"), [[1]], device="cuda")
    assert_refused(done, tmp_path, "device: got 'cuda', but this LibTorch finds no GPU")


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def _no_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def _change_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors, metadata = load_weights(folder / "model.safetensors")
        change(tensors)
        save_weights(folder / "model.safetensors", tensors, metadata)

    return apply


def _change_config(**changes: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))

    return apply


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut short": (_cut, "bytes inside the file"),
    "no header": (_no_header, "its header does not fit the file"),
    "no file": (lambda folder: (folder / "model.safetensors").unlink(), "cannot be read"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "cannot be read"),
    "damaged config": (lambda folder: (folder / "config.json").write_text("{"), "not JSON"),
    "no tensor": (
        _change_tensors(lambda tensors: tensors.pop("model.norm.weight")),
        "no tensor model.norm.weight, expected one of sizes [64]",
    ),
    "other sizes": (
        _change_tensors(lambda tensors: tensors.update({"model.norm.weight": torch.ones(8)})),
        "tensor model.norm.weight has sizes [8], expected [64]",
    ),
    "one too many": (
        _change_tensors(
            lambda tensors: tensors.update({"model.layers.0.mlp.gate_proj.bias": torch.ones(96)})
        ),
        "tensor model.layers.0.mlp.gate_proj.bias and 0 more are unknown",
    ),
    "other type": (
        _change_tensors(lambda tensors: tensors.update({"x": torch.ones(2, dtype=torch.uint8)})),
        'tensor x has type "U8", expected F32',
    ),
    "another family": (_change_config(model_type="gpt2"), "model_type: got 'gpt2'"),
    "other activation": (_change_config(hidden_act="gelu"), "hidden_act: got 'gelu'"),
    "windows": (_change_config(use_sliding_window=True), "use_sliding_window: got true"),
    "other positions": (
        _change_config(rope_parameters={"rope_type": "yarn"}),
        "rope_type: got 'yarn', expected 'default' or 'llama3'",
    ),
    "no number": (_change_config(hidden_size="many"), "config.json: "),
    "no heads": (_change_config(num_key_value_heads=0), "num_key_value_heads: got 0"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_model_is_one_line(
    run: Run, folders: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    damage, said = DAMAGES[name]
    shutil.copytree(folders("llama"), tmp_path / "model")
    damage(tmp_path / "model")
    assert_refused(run(tmp_path / "model", [[1]]), tmp_path, said)


def test_a_head_of_another_model_is_one_line(
    run: Run, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    done = run(folders("llama"), [[1]], method="eagle3", head=SHIPPED)
    assert_refused(done, tmp_path, "expected [49152, 576]: the head is for another target")
    done = run(
        folders("llama"), [[1]], method="eagle3", head=folders("llama") / "model.safetensors"
    )
    assert_refused(done, tmp_path, "not an EAGLE3 head")
