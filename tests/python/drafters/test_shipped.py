"""The shipped head on its real model: decoding through the product's own host and by walking."""

from __future__ import annotations

import pytest
import torch

from nwor_specpv import make_drafter
from nwor_specpv.drafters.eagle3 import SHIPPED, Eagle3Drafter
from nwor_specpv.drafters.eagle3_head import Eagle3Head
from nwor_specpv.models import smollm2
from nwor_specpv.train import acceptance, prompts
from nwor_specpv.train.prompt_file import prompt_encoder
from nwor_specpv.train.target import TrainingTarget


@pytest.mark.slow
def test_held_out_texts_are_drafted_well() -> None:
    """Loose bounds: a head that reads the wrong layers or rotates wrongly gets hardly above 1."""
    folder = smollm2("float32")
    head = Eagle3Head.load(SHIPPED)
    target = TrainingTarget(folder, head.shape.feature_layers)
    openings = prompts.held_out(prompt_encoder(folder))
    drafter = Eagle3Drafter(head, target.embedding)
    for kind, least in (("chat", 1.8), ("story", 2.0), ("code", 2.0)):
        chosen = [opening for opening in openings if opening.kind == kind][:3]
        longest = max(len(opening.tokens) for opening in chosen)
        corpus = acceptance.write_texts(target, chosen, 48, longest + 50)
        tally = acceptance.Tally()
        for row in range(len(chosen)):
            tree = acceptance.TREES["16 rows"]
            acceptance.walk(drafter, corpus, row, tree, target.hidden, tally)
        assert tally.tokens / tally.steps > least


@pytest.mark.slow
def test_a_hosts_model_gets_the_shipped_head() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2("float32"))
    drafter = make_drafter("eagle3", target=model)
    assert drafter.feature_layers == (2, 15, 27)
    assert drafter.vocab_size == model.config.vocab_size
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        hidden = model(tokens, output_hidden_states=True).hidden_states
    features = torch.cat([hidden[layer + 1][0] for layer in drafter.feature_layers], dim=-1)
    drafter.begin(0, tokens[0].tolist())
    drafter.observe(0, [6, 7, 8, 9], features)
    (tree,) = drafter.draft([0], acceptance.TREES["8 rows"])
    assert tree.tokens[0] == 9
    assert 1 < len(tree) <= 8
