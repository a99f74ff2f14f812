"""Wrong use of Generator and of its command line: one line that names the mend."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    T5Config,
    T5Model,
)

from nwor_specpv import DraftTree, NworConfig, NworError
from nwor_specpv.cli import main as cli
from nwor_specpv.cli.generate import view_config
from nwor_specpv.drafters import TreeConfig
from nwor_specpv.models.weights import load_weights, save_weights
from nwor_specpv.transformers import Generator, StaticKVCache, load_model, loading
from tests.python.transformers.tiny_models import FAMILIES, Oracle, tiny

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 5), r"input_ids: (prompt 0 is empty|got no prompts)"),
        (([[1, 2], []], 5), "input_ids: prompt 1 is empty"),
        (("text", 5), "input_ids: got text, expected token ids"),
        ((torch.zeros(2, 2, 2, dtype=torch.long), 5), r"input_ids: got \[2, 2, 2\]"),
        ((torch.zeros(3), 5), r"input_ids: got \[3\] of torch.float32"),
        ((None, 5), "input_ids: got NoneType, expected token ids, lists of them"),
        (({"input_ids": {}}, 5), "input_ids: got dict, expected token ids"),
        ((torch.zeros(0, dtype=torch.long), 5), "input_ids: prompt 0 is empty"),
        ((torch.zeros(0, 2, dtype=torch.long), 5), "input_ids: got no prompts"),
        ((torch.ones(2, dtype=torch.bool), 5), r"input_ids: got \[2\] of torch.bool"),
        (([[1, 2], 3], 5), "input_ids: got 3 among lists, expected prompts of ids"),
        (([1, 96], 5), "input_ids: got 96 in prompt 0, expected ids from 0 to 95"),
        (([-1], 5), "input_ids: got -1 in prompt 0"),
        (([True], 5), "input_ids: got True in prompt 0, expected ids from 0 to 95"),
        (([[1, 2.0]], 5), "input_ids: got 2.0 in prompt 0"),
        (([1], 0), "max_new_tokens: got 0, expected 1 or more"),
        (([1], 2.5), "max_new_tokens: got 2.5, expected 1 or more"),
        (([1], True), "max_new_tokens: got True, expected 1 or more"),
        (([1] * 512, 1), "input_ids: got 512 tokens in prompt 0, expected fewer than 512, the con"),
        (([1] * 500, 20), "max_new_tokens: got 20 after prompt 0 of 500 tokens, .* at most 12"),
        (([1], 5, None), "temperature: got None, expected a number"),
        (([1], 5, -0.1), "temperature: got -0.1, expected a finite number, 0 or more"),
        (([1], 5, float("nan")), "temperature: got nan, expected a finite number"),
        (([1], 5, float("inf")), "temperature: got inf, expected a finite number"),
        (([1], 5, 1e300), r"temperature: got 1e\+300, expected a finite number, 0 or more, in flo"),
        (([1], 5, 10**400), "temperature: got 1000+, expected a finite number"),
        (([1], 5, 1.0, -2), "top_k: got -2"),
        (([1], 5, 1.0, True), "top_k: got True"),
        (([1], 5, 1.0, 0, 0.0), "top_p: got 0.0"),
        (([1], 5, 1.0, 0, 1e-300), "top_p: got 1e-300, expected more than 0, at most 1, in floa"),
        (([1], 5, 1.0, 0, 1.0, "x"), "seed: got 'x', expected a whole number or None"),
        (([1], 5, 0.0, 0, 1.0, 1, 2.5), "eos_token_id: got 2.5, expected ids from 0 to 95, or -1"),
        (([1], 5, 0.0, 0, 1.0, 1, 96), "eos_token_id: got 96, expected ids from 0 to 95, or -1"),
        (([1], 5, 0.0, 0, 1.0, 1, [3, -2]), r"eos_token_id: got \[3, -2\], expected ids from 0"),
        (([1], 5, 0.0, 0, 1.0, 1, True), "eos_token_id: got True, expected ids"),
        (([1], 5, 0.0, 0, 1.0, 1, ""), "eos_token_id: got '', expected ids"),
        (([1], 5, 0.0, 0, 1.0, 1, None, None, 5), "on_token: got int, expected a function"),
        (([1], 5, 0.0, 0, 1.0, 1, None, 8), "tree: got int, expected a TreeConfig"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple, message: str) -> None:
    generator = Generator(tiny(), drafter="none")
    with pytest.raises(NworError, match=message) as caught:
        generator.generate(*arguments)
    assert "\n" not in str(caught.value)
    assert generator.generate([1, 2], 2).token_ids  # and nothing is left open


def test_other_wrong_options() -> None:
    generator = Generator(tiny(), drafter="none")
    with pytest.raises(NworError, match="chunk_rows: got 1"):
        generator.generate([1], 5, chunk_rows=1)
    with pytest.raises(NworError, match="eos_token_id: got"):
        generator.generate([1], 5, eos_token_id=["stop"])
    with pytest.raises(NworError, match="rows: got 300, expected 0 to 256"):
        TreeConfig(rows=300)
    with pytest.raises(NworError, match="page_size: got 0"):
        Generator(tiny(), drafter="none", page_size=0)
    with pytest.raises(NworError, match="cache_tokens: got -1, expected 1 or more"):
        Generator(tiny(), drafter="none", cache_tokens=-1)
    with pytest.raises(NworError, match="prefill_rows: got True, expected 1 or more"):
        Generator(tiny(), drafter="none", prefill_rows=True)
    with pytest.raises(NworError, match="enable_nwor: got False, expected True: this host has no"):
        Generator(tiny(), drafter="none", nwor=NworConfig(enable_nwor=False))
    with pytest.raises(NworError, match="--view-tokens: got 100, expected 176 or more"):
        view_config("lossless", 100)


def padded(rows: list[list[int]], left: bool) -> list[list[int]]:
    longest = max(map(len, rows))
    pads = [[0] * (longest - len(row)) for row in rows]
    return [pad + row if left else row + pad for pad, row in zip(pads, rows, strict=True)]


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("form", [list, torch.tensor, np.array])
def test_padded_prompts_are_refused(form: Any, left: bool) -> None:
    """Their padding would be read as text."""
    generator = Generator(tiny(), drafter="none")
    rows = form(padded([[5, 6, 7, 8], [9, 10]], left))
    line = (
        "input_ids: got 2 tokens of padding (0) around prompt 1, expected none: give lists, whose"
    )
    with pytest.raises(NworError, match=re.escape(line)):
        generator.generate(rows, 4)


def test_what_pads_is_known_from_the_model_and_the_tokenizer() -> None:
    class Padding:
        pad_token_id = 17

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return ""

    rows = [[5, 17], [6, 7]]
    with pytest.raises(NworError, match=r"1 tokens of padding \(17\) around prompt 0"):
        Generator(tiny(), Padding(), "none").generate(rows, 4)
    # Where it is also what ends or begins a text, nobody knows.
    for name in ("eos_token_id", "bos_token_id"):
        model = copy.deepcopy(tiny())
        setattr(model.generation_config, name, 17)
        assert len(Generator(model, Padding(), "none").generate(rows, 1).token_ids) == 2
        tokenizer = Padding()
        setattr(tokenizer, name, 17)
        assert len(Generator(tiny(), tokenizer, "none").generate(rows, 1).token_ids) == 2
    # Inside a text it pads nothing.
    assert (
        len(Generator(tiny(), Padding(), "none").generate([[5, 17, 6], [7, 8]], 1).token_ids) == 2
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (torch.tensor([[0, 0, 5, 6]]), "2 tokens of padding (0) around prompt 0"),
        ([0, 0, 0, 5], "3 tokens of padding (0) around prompt 0"),
        ([[5, 6, 0]], "1 tokens of padding (0) around prompt 0"),
        ([[5, 6], [0, 5, 6]], "1 tokens of padding (0) around prompt 1"),
    ],
)
def test_padding_is_refused_also_around_one_prompt_or_one_of_several_lengths(
    given: Any, told: str
) -> None:
    with pytest.raises(NworError, match=re.escape(f"input_ids: got {told}, expected none")):
        Generator(tiny(), drafter="none").generate(given, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", tiny("qwen2")),
        ("nwor", NworConfig()),
        ("cache_tokens", 4096),
        ("check_contract", True),
        ("cuda_graphs", False),
    ],
)
def test_what_is_shared_is_not_asked_for_again(name: str, value: Any) -> None:
    """It would be ignored."""
    first = Generator(tiny(), drafter="none")
    with pytest.raises(NworError, match=f"{name}: cannot be given with cache_of"):
        Generator(drafter="none", cache_of=first, **{name: value})
    assert Generator(first.model, drafter="none", cache_of=first).model is first.model


def test_models_that_cannot_be_run_are_refused() -> None:
    small = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    bert = BertModel(BertConfig(**small, num_hidden_layers=1, vocab_size=50))
    with pytest.raises(NworError, match="model: got BertModel, which generates no text"):
        Generator(bert, drafter="none")
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    t5 = T5Model(T5Config(**sizes, vocab_size=50))
    with pytest.raises(NworError, match="model: got T5Model, an encoder-decoder; use a decoder"):
        Generator(t5, drafter="none")

    class Closed(type(tiny())):
        _supports_attention_backend = False

    closed = Closed(tiny().config)
    with pytest.raises(NworError, match="model: got Closed, whose attention cannot be replaced"):
        Generator(closed, drafter="none")
    with pytest.raises(NworError, match="model: got Linear, expected a causal language model"):
        Generator(torch.nn.Linear(2, 2), drafter="none")
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(FAMILIES["llama"]())
    with pytest.raises(NworError, match=r"model: got no weights for model.embed_tokens.weight"):
        Generator(empty, drafter="none")


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("diffllama", {}, "DiffLlamaAttention attends with other K/V than it caches"),
        ("doge", {}, "a layer asks for attention_mask, which verify attention does not support"),
        ("nemotron", {}, "NemotronAttention does not hand the keyword nwor_step to its attention"),
        (
            "gemma3_text",
            {"use_bidirectional_attention": True},
            "Gemma3Attention attends to later tokens",
        ),
        (
            "deepseek_v3",
            {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
            r"got key states of \[1, 1, 3, 8\] from layer 0, expected \[1, 2, 3, 8\]",
        ),
    ],
)
def test_models_whose_attention_is_another_one_are_refused(
    family: str, sizes: dict[str, Any], message: str
) -> None:
    """They take our function and would say something else with it."""
    small = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**small | sizes))
    generator = Generator(model, drafter="none")
    with pytest.raises(NworError, match=message) as caught:
        generator.generate([1, 2, 3], 4)
    assert "\n" not in str(caught.value)


def test_layers_of_several_head_sizes_are_refused() -> None:
    config = CONFIG_MAPPING["gemma4_text"](
        vocab_size=96,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=96,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = AutoModelForCausalLM.from_config(config)
    line = "^model: got layers of different head_dim, expected the same in all$"
    with pytest.raises(NworError, match=line):
        Generator(model, drafter="none")
    with pytest.raises(NworError, match=line):
        StaticKVCache.from_config(config, 64)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize("kinds", [{torch.nn.Linear}, {"model.layers.1.mlp.up_proj"}])
def test_layers_quantised_by_the_rows_of_a_pass_are_refused(
    kinds: set, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts beside a token would change it."""
    # torch's default engine does not know every processor of its wheels.
    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")
    model = torch.ao.quantization.quantize_dynamic(tiny(), kinds, dtype=torch.qint8)
    with pytest.raises(NworError, match=r"^model: .* is quantised by torch\.ao, and") as caught:
        Generator(model, drafter="none")
    assert "\n" not in str(caught.value)


def test_a_layer_that_attends_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fills the cache and never asks us what is in it."""
    model = copy.deepcopy(tiny("qwen3"))
    attention = model.model.layers[1].self_attn

    def forward(hidden_states, past_key_values, **more):
        rows = torch.zeros(1, 2, hidden_states.shape[1], 32)
        past_key_values.update(rows, rows, 1)
        return hidden_states, None

    monkeypatch.setattr(attention, "forward", forward)
    with pytest.raises(NworError, match="a layer that attends by itself, expected all to go"):
        Generator(model, drafter="none").generate([1, 2, 3], 4)


def test_folders_without_a_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(NworError, match="model: got '/nowhere', expected the folder of a model"):
        Generator("/nowhere", drafter="none")
    with pytest.raises(NworError, match=r"has no config.json"):
        Generator(tmp_path, drafter="none")
    tiny().config.save_pretrained(tmp_path)
    with pytest.raises(NworError, match=r"cannot be loaded: .*model.safetensors"):
        Generator(tmp_path, drafter="none")
    tiny().save_pretrained(tmp_path)
    assert Generator(tmp_path, drafter="none").generate([1, 2, 3], 4).token_ids
    with pytest.raises(NworError, match=r"^dtype: got 'int4', expected one of float32"):
        load_model(tmp_path, "int4")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda w: w.pop(UP), f"has no weights for {UP}; fetch or convert it again"),
        (lambda w: [w.pop(k) for k in list(w)[3:]], "has no weights for .* and [0-9]+ more; fetch"),
        (lambda w: w.update({UP: torch.zeros(3, 3)}), f"has weights of another size for {UP}; "),
    ],
)
def test_weights_that_are_not_all_there_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: Any, message: str
) -> None:
    """Not made up, which is what transformers does."""
    tiny().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights, metadata = load_weights(file)
    damage(weights)
    save_weights(file, weights, metadata)
    capfd.readouterr()
    with pytest.raises(NworError, match=message):
        load_model(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_folder_of_an_encoder_is_refused_as_one(tmp_path: Path) -> None:
    """Not for the weights that it has none of."""
    small = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(**small, num_hidden_layers=1, vocab_size=50)).save_pretrained(tmp_path)
    with pytest.raises(NworError, match="got BertLMHeadModel, whose attention cannot be replaced"):
        load_model(tmp_path)


def test_files_that_are_cut_off_are_named(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(NworError, match=f"the tokenizer in {tmp_path} cannot be loaded: Expecting"):
        load_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(NworError, match=f"{tmp_path} cannot be loaded: .*; fetch or convert"):
        load_model(tmp_path)


def test_drafters_of_another_model_are_refused() -> None:
    with pytest.raises(
        NworError, match="got 'telepathy', expected one of none, draft_model, ngram, eagle3"
    ):
        Generator(tiny(), drafter="telepathy")
    with pytest.raises(NworError, match="drafter: got int, expected a name or a Drafter"):
        Generator(tiny(), drafter=3)
    with pytest.raises(NworError, match="draft_model: got None, expected a smaller model"):
        Generator(tiny(), drafter="draft_model")
    with pytest.raises(NworError, match="draft_model: model: got '/nowhere', expected the folder"):
        Generator(tiny(), drafter="draft_model", draft_model="/nowhere")
    with pytest.raises(NworError, match="draft_model: the drafter 'ngram' uses none"):
        Generator(tiny(), drafter="ngram", draft_model=tiny("qwen2"))
    with pytest.raises(
        NworError, match=r"a target of vocabulary 96 .* use the drafter 'ngram', or"
    ):
        Generator(tiny(), drafter="eagle3")
    other = tiny(vocab_size=97)
    with pytest.raises(NworError, match="got a vocabulary of 97, expected the target's 96"):
        Generator(tiny(), drafter="draft_model", draft_model=other)
    oracle = Oracle({}, random.Random(0), feature_layers=(0, 7))
    with pytest.raises(NworError, match="features of layer 7, expected 0 to 2"):
        Generator(tiny(), drafter=oracle)


@pytest.mark.parametrize(
    ("trees", "message"),
    [
        ([DraftTree([90, 1000], [-1, 0])], "drafter: got token 1000, expected ids from 0 to 95"),
        ([DraftTree([90, 5, -7], [-1, 0, 1])], "drafter: got token -7, expected ids from 0 to 95"),
        ([], "drafter: got 0 trees, expected 1"),
        ([DraftTree([95, 1], [-1, 0])], "drafter: got a root of 95"),
    ],
)
def test_a_drafter_that_breaks_its_promise_is_named(trees: list, message: str) -> None:
    class Wrong(Oracle):
        def draft(self, requests, tree):
            root = self.seen[requests[0]][-1]
            return [
                DraftTree([root, *t.tokens[1:]], t.parents) if t.tokens[0] == 90 else t
                for t in trees
            ]

    generator = Generator(tiny(), drafter=Wrong({}, random.Random(0)))
    prompt = [5, 6, 7]
    assert generator.generate(prompt, 1).token_ids != [95]
    with pytest.raises(NworError, match=message):
        generator.generate(prompt, 8, tree=TreeConfig(rows=4, depth=3, top_k=1))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "one of the arguments --prompt --file is required"),
        (["--prompt", "a", "--file", "b"], "argument --file: not allowed with argument --prompt"),
        (["--file", "/nowhere/text"], "--file: got '/nowhere/text', which cannot be read"),
        (["--prompt", "a", "--specpv", "maybe"], "argument --specpv: invalid choice: 'maybe'"),
        (["--prompt", "a", "--dtype", "int4"], "dtype: got 'int4', expected one of float32"),
        (["--prompt", "a", "--device", "tpu"], "--device: got 'tpu', expected cpu or cuda"),
        (["--prompt", "a", "--threads", "0"], "--threads: got 0, expected 1 or more"),
        (["--prompt", "a", "--model", "/nowhere"], "model: got '/nowhere', expected the folder"),
        (["--prompt", "a", "--max-new-tokens", "x"], "--max-new-tokens: got 'x', expected a whole"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens: got 0, expected 1 or more"),
        (["--prompt", "a", "--drafter", "telepathy"], "drafter: got 'telepathy', expected one of"),
        (["--prompt", "a", "--drafter", "draft_model"], "draft_model: got None, expected a small"),
        (["--prompt", "a", "--draft-model", "b"], "draft_model: the drafter 'eagle3' uses none"),
        (["--prompt", "a", "--specpv", "lossless", "--view-tokens", "9"], "--view-tokens: got 9, "),
        (["--prompt", "a", "--view-tokens", "512"], "--view-tokens: got 512 beside --specpv off, "),
        (["--prompt", "a", "--view-tokens", "9"], "expected --specpv rectify, refresh or lossless"),
        (["--prompt", "a", "--offload"], "--offload: got True beside --specpv off, "),
        (
            ["--prompt", "a", "--specpv-storage", "compact"],
            "--specpv-storage: got compact beside --specpv off, ",
        ),
        (
            ["--prompt", "a", "--specpv", "refresh", "--specpv-storage", "paged", "--offload"],
            "--offload: got --specpv-storage paged beside it, expected compact",
        ),
        (["--prompt", "a", "--temperature", "-1"], "temperature: got -1.0, expected a finite numb"),
        (["--prompt", "a", "--temperature", "1e300"], "temperature: got 1e+300, expected a finite"),
        (["--prompt", "a", "--top-p", "1e-300"], "top_p: got 1e-300, expected more than 0, at mos"),
        (["--prompt", "a", "--top-p", "2"], "top_p: got 2.0, expected more than 0, at most 1"),
    ],
)
def test_the_command_line_says_it_in_one_line_and_loads_no_model(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    line: str,
) -> None:
    monkeypatch.setattr(loading, "_load_weights", lambda *_: pytest.fail("loaded a model"))
    try:
        code = cli.main(["generate", *arguments])
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert line in err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of one word per id."""
    path = tmp_path_factory.mktemp("model")
    tiny().save_pretrained(path)
    words = {f"w{i}": i for i in range(96)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_generate_prints_text_or_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["generate", "--model", str(folder), "--drafter", "none", "--max-new-tokens", "6"]
    assert cli.main([*common, "--prompt", "w1 w2 w3", "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert err == ""
    assert set(told) == {"token_ids", "text", "finish", "stats"}
    assert len(told["token_ids"]) == told["stats"]["new_tokens"] == 6
    assert cli.main([*common, "--prompt", "w1 w2 w3"]) == 0
    out, err = capsys.readouterr()
    assert out == told["text"] + "\n"
    assert err.startswith("6 tokens, ")
    (folder / "prompt.txt").write_text("w1 w2 w3")
    assert cli.main([*common, "--file", str(folder / "prompt.txt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == told["token_ids"]
    hot = [*common, "--prompt", "w1 w2 w3", "--temperature", "2", "--seed", "4", "--json"]
    texts = []
    for _ in range(2):
        assert cli.main(hot) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]


def test_generate_keeps_the_cache_where_it_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, asked = Generator.__init__, []

    def watch(self: Generator, *arguments: Any, specpv: Any, **options: Any) -> None:
        asked.append((specpv.specpv_storage, specpv.specpv_offload))
        made(self, *arguments, specpv=specpv, **options)

    monkeypatch.setattr(Generator, "__init__", watch)
    rng = random.Random(3)
    prompt = " ".join(f"w{rng.randrange(1, 96)}" for _ in range(250))
    command = ["generate", "--model", str(folder), "--drafter", "none", "--max-new-tokens", "20"]
    command += ["--prompt", prompt, "--json", "--specpv", "refresh", "--view-tokens", "176"]
    found = []
    for storage in ([], ["--specpv-storage", "compact"], ["--offload"]):
        assert cli.main([*command, *storage]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert asked == [("paged", False), ("compact", False), ("compact", True)]
    assert found[0]["stats"]["step_kinds"]["partial"] > 0
    for told in found[1:]:
        assert told["token_ids"] == found[0]["token_ids"]
        assert told["stats"]["step_kinds"] == found[0]["stats"]["step_kinds"]


def test_generate_drafts_for_any_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The shipped head is of another model, so without a drafter's name n-grams draft."""
    command = ["generate", "--model", str(folder), "--max-new-tokens", "40", "--json"]
    command += ["--prompt", "w1 w2 w3 w1 w2 w3 w1 w2"]
    found = []
    for drafter in ([], ["--drafter", "ngram"], ["--drafter", "none"]):
        assert cli.main([*command, *drafter]) == 0
        found.append(json.loads(capsys.readouterr().out))
    default, named, none = found
    assert default["token_ids"] == named["token_ids"] == none["token_ids"]
    # How many is up to what passes cost here and now.
    assert default["stats"]["drafts"] > 0
    assert named["stats"]["drafts"] > 0
    assert none["stats"]["drafts"] == 0
