"""Options of transformers' `generate` that a Generator does not have, each with its own way."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NoReturn

from nwor_specpv import NworError

_PROCESSORS = {
    "bad_words_ids": "NoBadWordsLogitsProcessor",
    "begin_suppress_tokens": "SuppressTokensAtBeginLogitsProcessor",
    "epsilon_cutoff": "EpsilonLogitsWarper",
    "eta_cutoff": "EtaLogitsWarper",
    "exponential_decay_length_penalty": "ExponentialDecayLengthPenalty",
    "forced_bos_token_id": "ForcedBOSTokenLogitsProcessor",
    "forced_eos_token_id": "ForcedEOSTokenLogitsProcessor",
    "min_length": "MinLengthLogitsProcessor",
    "min_new_tokens": "MinNewTokensLengthLogitsProcessor",
    "no_repeat_ngram_size": "NoRepeatNGramLogitsProcessor",
    "prefix_allowed_tokens_fn": "PrefixConstrainedLogitsProcessor",
    "sequence_bias": "SequenceBiasLogitsProcessor",
    "suppress_tokens": "SuppressTokensLogitsProcessor",
    "typical_p": "TypicalLogitsWarper",
}
_WAYS = {
    "assistant_model": "use Generator(model, drafter='draft_model', draft_model=...)",
    "cache_implementation": "leave it out; a Generator has its own paged cache",
    "custom_generate": "call the function on the model itself",
    "do_sample": "a temperature above 0 samples, 0 is greedy",
    "encoder_outputs": "use a decoder-only model",
    "frequency_penalty": "use repetition_penalty, presence_penalty or a logits_processor",
    "generation_config": "give its values as arguments; the end token is read from the model",
    "guidance_scale": "leave it out; there is no guidance",
    "inputs": "call it input_ids",
    "inputs_embeds": "give input_ids",
    "length_penalty": "leave it out; there is no beam search",
    "max_length": "use max_new_tokens, which counts new tokens alone",
    "max_time": "raise from on_token to end a call",
    "negative_prompt_ids": "leave it out; there is no guidance",
    "num_assistant_tokens": "use tree=TreeConfig(rows, depth, top_k)",
    "num_beams": "leave it out; there is no beam search",
    "output_attentions": "call the model itself",
    "output_hidden_states": "call the model itself",
    "output_logits": "use return_logprobs, or a logits_processor that keeps what it gets",
    "output_scores": "use return_logprobs, or a logits_processor that keeps what it gets",
    "pad_token_id": "leave it out; prompts are lists and nothing is padded",
    "past_key_values": "leave it out; a Generator keeps earlier prompts itself",
    "position_ids": "leave it out; a prompt begins at 0",
    "prompt_lookup_num_tokens": "use Generator(model, drafter='ngram')",
    "return_dict_in_generate": "leave it out; the result is a Generation",
    "stop_strings": "use stop, which takes strings and token ids",
    "stop_token_ids": "use stop, which takes strings and token ids",
    "stopping_criteria": "use stop, which takes strings and token ids, or raise from on_token",
    "synced_gpus": "leave it out; one process runs the model",
    "token_type_ids": "leave it out; a decoder has none",
    "tokenizer": "give it to Generator(model, tokenizer)",
    "use_cache": "leave it out; there is always a cache",
    "use_model_defaults": "leave it out; generate starts from its own defaults",
    "watermarking_config": "leave it out; there are no watermarks",
}


def refuse_options(given: Iterable[str], own: Iterable[str]) -> None:
    """Raises if an option was given that `generate` does not have."""
    for name in given:
        _refuse(name, own)


def _refuse(name: str, own: Iterable[str]) -> NoReturn:
    way = _WAYS.get(name)
    if name in _PROCESSORS:
        way = f"use logits_processor=[{_PROCESSORS[name]}(...)] of transformers"
    if way is None:
        near = difflib.get_close_matches(name, list(own), 1)
        way = f"the nearest is {near[0]}" if near else "docs/generate_options.md lists the options"
    raise NworError(f"{name}: not an option of Generator.generate; {way}")
