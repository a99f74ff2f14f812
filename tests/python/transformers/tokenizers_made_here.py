"""A tokenizer of words: the id of "w5;" is 5, and a text is its words one after the other."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from tests.python.transformers.tiny_models import VOCAB

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('no system turns') }}{% endif %}w90;{{ message['content'] }}w91;"
    "{% endfor %}{% if add_generation_prompt %}w92;{% endif %}"
)


def words(*, chat: bool = False) -> PreTrainedTokenizerFast:
    """Token 0 pads. `chat`: with a chat template."""
    names = {("pad" if i == 0 else f"w{i};"): i for i in range(VOCAB - 1)}
    names["abcdef"] = VOCAB - 1  # with which transformers tries out how tokens are joined
    made = Tokenizer(WordLevel(names, unk_token="pad"))
    made.pre_tokenizer = Split(Regex("[^;]*;"), "isolated")
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="pad")
    if chat:
        tokenizer.chat_template = TEMPLATE
    return tokenizer
