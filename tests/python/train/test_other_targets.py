"""Training for targets beside SmolLM2: Qwen2, untied output matrices, other chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from nwor_specpv import NworError
from nwor_specpv.drafters import TreeConfig, make_drafter
from nwor_specpv.drafters.eagle3_head import Eagle3Head
from nwor_specpv.train.chat_format import CHATML, read_chat_format
from nwor_specpv.train.eagle3 import Training, TrainingPlan
from nwor_specpv.train.prompt_file import read_stop_tokens, stop_tokens, write_prompts
from nwor_specpv.train.prompts import Opening
from nwor_specpv.train.target import TrainingTarget
from nwor_specpv.transformers import Generator

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
KINDS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}


def make_model(folder: Path, kind: str, *, tied: bool, shard: str = "1GB"):
    torch.manual_seed(5)
    config, model = KINDS[kind]
    made = model(config(**SIZES, tie_word_embeddings=tied)).eval()
    for name, weight in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)  # which are 0 in a new model
    made.save_pretrained(folder, max_shard_size=shard)
    return made


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_target_says_what_transformers_says(kind: str, tied: bool, tmp_path: Path) -> None:
    model = make_model(tmp_path, kind, tied=tied, shard="20KB" if not tied else "1GB")
    assert (tmp_path / "model.safetensors").is_file() == tied  # or several files
    target = TrainingTarget(tmp_path)
    tokens = torch.randint(1, 50, (3, 20))
    target.allocate(3, 20)
    features, normed = target.step(tokens, 0, torch.zeros(3, dtype=torch.int64))
    with torch.no_grad():
        told = model(tokens, output_hidden_states=True)
    torch.testing.assert_close(target.logits(normed), told.logits, atol=1e-4, rtol=1e-4)
    layers = [told.hidden_states[1 + layer] for layer in target.feature_layers[:-1]]
    seen = features[..., : 32 * len(layers)]
    torch.testing.assert_close(seen, torch.cat(layers, -1), atol=1e-4, rtol=1e-4)


def test_windows_and_other_kinds_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen2", tied=True)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(saved | {"use_sliding_window": True}))
    with pytest.raises(NworError, match="got use_sliding_window True, expected False"):
        TrainingTarget(tmp_path)
    file.write_text(json.dumps(saved))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(NworError, match=r"got no model.safetensors, expected a Hugging Face"):
        TrainingTarget(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_trained_and_drafts_for_it(kind: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "target", kind, tied=False)
    target = TrainingTarget(tmp_path / "target")
    opening = Opening("chat", [3, 4, 5], (2, 4), [6, 7])
    plan = TrainingPlan(
        minutes=5.0,
        updates=2,
        cycles=1,
        length=40,
        tokens=160,
        rows=4,
        batch_tokens=80,
        intermediate=16,
        window=16,
        draft_vocabulary=20,
        listed_vocabulary=0,
        measure_tokens=8,
    )
    Training(target, [opening] * 4, [opening] * 2, plan, tmp_path).run()
    assert Eagle3Head.load(tmp_path / "eagle3.safetensors").shape.hidden == 32
    drafter = make_drafter(
        "eagle3", target=model, weights=tmp_path / "eagle3.safetensors", min_probability=0.0
    )
    plain = Generator(model, drafter="none", check_contract=True)
    ours = Generator(model, drafter=drafter, check_contract=True)
    tree = TreeConfig(rows=6, depth=3, top_k=2)
    told = ours.generate([3, 4, 5], 16, tree=tree, eos_token_id=-1)
    assert told.token_ids == plain.generate([3, 4, 5], 16, eos_token_id=-1).token_ids
    assert told.stats.drafts > 0
    assert told.stats.violations == []


CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for message in messages %}{{ '<h>' + message['role'] + '</h>\n' "
    "+ message['content'] | trim + '<eot>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<h>assistant</h>\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ '<u>' + messages[0]['content'] + '<e><m>' }}"
)


def write_template(folder: Path, template: object, **more: object) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"chat_template": template, "bos_token": "<s>", **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_chats_are_written_as_the_targets_template_writes_them(tmp_path: Path) -> None:
    assert read_chat_format(tmp_path) == CHATML  # without a template
    for given in (CHATML_TEMPLATE, [{"name": "default", "template": CHATML_TEMPLATE}]):
        assert read_chat_format(write_template(tmp_path, given)) == CHATML
    other = read_chat_format(write_template(tmp_path, HEADERS))
    assert other.prompt("Why?", "Be kind.") == (
        "<s><h>system</h>\nBe kind.<eot><h>user</h>\nWhy?<eot><h>assistant</h>\n"
    )
    assert other.prompt("Why?", "").startswith(other.question("Wh", ""))
    alone = read_chat_format(write_template(tmp_path, NO_SYSTEM))
    assert (alone.prompt("Why?", "Be kind."), alone.answer) == ("<u>Why?<e><m>", "<e><m>")
    (tmp_path / "chat_template.jinja").write_text(HEADERS)
    assert read_chat_format(tmp_path) == other


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{{ raise_exception('never') }}", "its chat template refuses a question: never"),
        ("{{ messages[0]['content'] }}", "writes nothing after a question"),
        ("nothing", "writes nothing after a question"),
        ("{% if %}", "its chat template refuses a question"),
    ],
)
def test_templates_that_are_none_are_named(template: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(NworError, match=line) as told:
        read_chat_format(write_template(tmp_path, template))
    assert "\n" not in str(told.value)


def make_tokenizer(folder: Path) -> None:
    """Of characters and of the markers of HEADERS."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    names = ["?", "<s>", "<eot>", "<h>", "</h>"]
    made = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="?"))
    made.pre_tokenizer = Split(Regex("<s>|<eot>|</?h>|."), "isolated")
    made.save(str(folder / "tokenizer.json"))


def test_prompts_know_what_ends_a_turn(tmp_path: Path) -> None:
    folder = write_template(tmp_path / "target", HEADERS)
    make_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 4}))
    path = tmp_path / "prompts.json"
    write_prompts(folder, path, 16)
    # "<|endoftext|>" is many tokens here, each unknown.
    assert read_stop_tokens(path, 5) == (1, 4, 2)
    data = json.loads(path.read_text())
    assert {tuple(one["answer"][:1]) for one in data["openings"] if one["answer"]} == {(3,)}
    data["stop_tokens"] = [7]
    path.write_text(json.dumps(data))
    with pytest.raises(NworError, match=r"stop_tokens: got \[7\], expected ids from 0 to 4"):
        read_stop_tokens(path, 5)
    del data["stop_tokens"]
    path.write_text(json.dumps(data))
    assert read_stop_tokens(path, 5) == (0, 2)


def test_an_end_of_a_turn_that_the_tokenizer_does_not_know_is_named(tmp_path: Path) -> None:
    with pytest.raises(NworError, match="without a token that ends a turn"):
        stop_tokens(tmp_path, lambda text: [0], CHATML)
