"""PURE. Fields of requests whose check is more than a type and a range: any JSON value in, the checked value out.

Each function raises `WrongValueError`, a finished sentence. What depends on the model served (ids against the
vocabulary) is `router/prepare.py`. Nothing here takes longer than one look at each entry.
"""

from __future__ import annotations

import re
from typing import Any

from router.sentences import WrongValueError, short

#: OpenAI's limit.
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
#: vLLM's limit.
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 128
MAX_BIASES = 1024
#: OpenAI's limit.
MAX_BIAS = 100
_TOKEN_KEY = re.compile(r"-?(?:0|[1-9][0-9]{0,99})")

PROMPT_FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids; none of them empty"


def all_integers(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)  # a bool is an int to isinstance


def check_stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise WrongValueError(
            f"stop is {short(value)}; allowed: a string or a list of at most {MAX_STOP_STRINGS} strings."
        )
    if len(stops) > MAX_STOP_STRINGS:
        raise WrongValueError(f"stop has {len(stops)} entries; allowed: at most {MAX_STOP_STRINGS}.")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise WrongValueError(f"stop contains {short(stop)}; allowed: strings of 1 to {MAX_STOP_CHARS} characters.")
    return tuple(stops)


def check_stop_token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_STOP_TOKEN_IDS or not all_integers(value):
        raise WrongValueError(
            f"stop_token_ids is {short(value)}; allowed: a list of at most {MAX_STOP_TOKEN_IDS} integers."
        )
    return tuple(value)


def check_prompt(value: object) -> list[str] | list[list[int]]:
    """Every form becomes a list of prompts. The number of prompts is checked later, against the settings, before any
    work.
    """
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise WrongValueError(f"prompt is {short(value)}; allowed: {PROMPT_FORMS}.")
    if type(value[0]) is int:
        value = [value]
    if isinstance(value[0], str):
        for position, prompt in enumerate(value):
            if not isinstance(prompt, str):
                raise WrongValueError(f"prompt[{position}] is {short(prompt)} beside strings; allowed: {PROMPT_FORMS}.")
            if not prompt:
                raise WrongValueError(
                    "prompt is an empty string, which has no tokens; allowed: at least one character."
                )
        return value
    for position, prompt in enumerate(value):
        if not isinstance(prompt, list) or not prompt or not all_integers(prompt):
            raise WrongValueError(f"prompt[{position}] is {short(prompt)}; allowed: {PROMPT_FORMS}.")
    return value


def check_logit_bias(value: object) -> dict[int, float]:
    """JSON object keys are strings: "123" is token 123."""
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise WrongValueError(
            f"logit_bias is {short(value)}; allowed: an object of at most {MAX_BIASES} token ids and their biases."
        )
    result: dict[int, float] = {}
    for key, bias in value.items():
        if not isinstance(key, str) or not _TOKEN_KEY.fullmatch(key):
            raise WrongValueError(f"logit_bias has the key {short(key)}; allowed: token ids.")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise WrongValueError(
                f"logit_bias of token {key} is {short(bias)}; allowed: a number from -{MAX_BIAS} to {MAX_BIAS}."
            )
        result[int(key)] = float(bias)
    return result


def check_bad_words(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise WrongValueError(f"bad_words is {short(value)}; allowed: a list of at most {MAX_BAD_WORDS} strings.")
    if len(value) > MAX_BAD_WORDS:
        raise WrongValueError(f"bad_words has {len(value)} entries; allowed: at most {MAX_BAD_WORDS}.")
    for word in value:
        if not isinstance(word, str) or not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
            raise WrongValueError(
                f"bad_words contains {short(word)}; allowed: strings of 1 to {MAX_BAD_WORD_CHARS} characters."
            )
    return tuple(value)


def check_allowed_token_ids(value: object) -> tuple[int, ...]:
    """In order and each once, so that equal sets are equal. An empty list would forbid every token: refused, as in
    vLLM.
    """
    if not isinstance(value, list) or not value or not all_integers(value):
        raise WrongValueError(f"allowed_token_ids is {short(value)}; allowed: a list of at least one token id.")
    return tuple(sorted(set(value)))
