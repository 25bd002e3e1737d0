"""PURE. JSON that arrives in pieces, checked character by character: what was read is always the beginning of something
valid, and the first character that cannot be is found at once.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

SPACE = " \t\n\r"
Status = Literal["open", "done", "broken"]

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = frozenset("0123456789abcdefABCDEF")
_DIGITS = "0123456789"


def _bare_steps() -> dict[tuple[str, str], str]:
    """(state, character) -> state, for numbers and literals. A literal's state is how much of it there is."""
    steps = {
        ("", "-"): "minus",
        ("zero", "."): "point",
        ("int", "."): "point",
        ("e", "+"): "sign",
        ("e", "-"): "sign",
    }
    for state in ("zero", "int", "fraction"):
        steps |= {(state, "e"): "e", (state, "E"): "e"}
    for state in ("", "minus"):
        steps |= {(state, digit): "int" for digit in _DIGITS} | {(state, "0"): "zero"}
    for states, after in (
        (("int",), "int"),
        (("point", "fraction"), "fraction"),
        (("e", "sign", "exponent"), "exponent"),
    ):
        steps |= {(state, digit): after for state in states for digit in _DIGITS}
    for word in ("true", "false", "null"):
        steps |= {(word[:length], word[length]): word[: length + 1] for length in range(len(word))}
    return steps


_BARE_STEPS = _bare_steps()
_BARE_ENDS = frozenset({"zero", "int", "fraction", "exponent", "true", "false", "null"})


class JsonObject:
    """One JSON object of any content, strictly as in RFC 8259. Nesting costs no recursion."""

    __slots__ = ("_bare", "_closers", "_escape", "_expect", "_in_string", "status")

    def __init__(self) -> None:
        self.status: Status = "open"
        #: brackets that are owed, innermost last
        self._closers: list[str] = []
        #: object, value, value_or_end, key, key_or_end, colon, next
        self._expect = "object"
        #: state of a number or literal that is being read
        self._bare = ""
        self._in_string = False
        #: of an escape in a string: the backslash, or u and its digits
        self._escape = ""

    def push(self, text: str, start: int) -> int:
        """Read on from `start`. Returns the position behind what belongs to the object; when it is broken, the position
        of the character that cannot be.
        """
        position = start
        while position < len(text) and self.status == "open":
            if self._in_string:
                position = self._string(text, position)
            else:
                position += self._outside(text[position])
        return position

    def _outside(self, char: str) -> int:
        """A character outside of strings; how many were taken, 0 or 1."""
        if self._bare:
            after = _BARE_STEPS.get((self._bare, char))
            if after is not None:
                self._bare = after
                return 1
            if self._bare not in _BARE_ENDS:
                self.status = "broken"
                return 0
            self._bare, self._expect = "", "next"
        if char in SPACE or self._punctuation(char):
            return 1
        self.status = "broken"
        return 0

    def _punctuation(self, char: str) -> bool:
        expect = self._expect
        wants_value = expect in ("value", "value_or_end")
        if char == '"' and (wants_value or expect in ("key", "key_or_end")):
            self._in_string = True
        elif char == "{" and (wants_value or expect == "object"):
            self._closers.append("}")
            self._expect = "key_or_end"
        elif char == "[" and wants_value:
            self._closers.append("]")
            self._expect = "value_or_end"
        elif char == ":" and expect == "colon":
            self._expect = "value"
        elif char == "," and expect == "next":
            self._expect = "key" if self._closers[-1] == "}" else "value"
        elif expect in ("next", "key_or_end", "value_or_end") and char == self._closers[-1]:
            self._closers.pop()
            self._expect = "next"
            if not self._closers:
                self.status = "done"
        elif wants_value and ("", char) in _BARE_STEPS:
            self._bare = _BARE_STEPS["", char]
        else:
            return False
        return True

    def _string(self, text: str, position: int) -> int:
        if self._escape:
            return position + self._escaped(text[position])
        match = _PLAIN.match(text, position)
        end = match.end() if match else position
        if end == len(text):
            return end
        if text[end] == '"':
            self._in_string = False
            self._expect = "colon" if self._expect in ("key", "key_or_end") else "next"
        elif text[end] == "\\":
            self._escape = "\\"
        else:  # a control character
            self.status = "broken"
            return end
        return end + 1

    def _escaped(self, char: str) -> int:
        if self._escape == "\\" and char in '"\\/bfnrt':
            self._escape = ""
        elif self._escape == "\\" and char == "u":
            self._escape = "u"
        elif self._escape[0] == "u" and char in _HEX:
            self._escape = "" if len(self._escape) == 4 else self._escape + char
        else:
            self.status = "broken"
            return 0
        return 1


#: keys of a call: what each is read as. `type` and `id` say nothing.
_CALL_KEYS = {"name": "name", "arguments": "arguments", "parameters": "arguments", "type": "type", "id": "id"}


class CallObject:
    """The object of one tool call behind its opening brace: `"name": ..., "arguments": {...}}`, in any order.

    Broken as soon as a key or the name can no longer become one of those that are allowed.
    """

    __slots__ = (
        "_arguments",
        "_expect",
        "_has_arguments",
        "_key",
        "_names",
        "_new",
        "_seen",
        "_word",
        "name",
        "status",
    )

    def __init__(self, names: Collection[str]) -> None:
        self.status: Status = "open"
        #: known once it is complete
        self.name: str | None = None
        self._names = names
        #: key, key_or_end, colon, value, next
        self._expect = "key_or_end"
        self._key = ""
        self._seen: set[str] = set()
        #: a key or the name as far as it was read, None outside of them
        self._word: str | None = None
        self._arguments: JsonObject | None = None
        self._has_arguments = False
        self._new: list[str] = []

    @property
    def has_begun(self) -> bool:
        """The name and a beginning of the arguments are known: from here on it can be told as it arrives."""
        return self.name is not None and (self._has_arguments or self.status == "done")

    def take_arguments(self) -> str:
        """Arguments read since the last time."""
        text = "".join(self._new)
        self._new.clear()
        return text

    def push(self, text: str, start: int) -> int:
        """Read on from `start`. Returns the position behind what belongs to the call; when it is broken, the position
        of the character that cannot be.
        """
        position = start
        while position < len(text) and self.status == "open":
            if self._arguments is not None and self._arguments.status == "open":
                position = self._read_arguments(self._arguments, text, position)
            elif self._word is not None:
                position += self._read_word(text[position], self._word)
            elif text[position] in SPACE or self._punctuation(text[position]):
                position += 1
            elif self._expect == "value" and self._key == "arguments":
                self._arguments = JsonObject()
            else:
                self.status = "broken"
        return position

    def _read_arguments(self, arguments: JsonObject, text: str, position: int) -> int:
        end = arguments.push(text, position)
        self._has_arguments |= end > position
        if arguments.status == "done":
            # the last brace is told with the end of the call, so that the arguments of a broken call never look whole
            self._new.append(text[position : end - 1])
            self._expect = "next"
            return end
        self._new.append(text[position:end])
        if arguments.status == "broken":
            self.status = "broken"
        return end

    def _read_word(self, char: str, word: str) -> int:
        is_key = self._expect in ("key", "key_or_end")
        allowed: Collection[str] | None = _CALL_KEYS if is_key else self._names if self._key == "name" else None
        if char == '"' and (allowed is None or word in allowed) and (not is_key or self._take_key(word)):
            if not is_key and self._key == "name":
                self.name = word
            self._word = None
            self._expect = "colon" if is_key else "next"
        elif (
            char != '"'
            and char != "\\"
            and char >= " "
            and (allowed is None or any(name.startswith(word + char) for name in allowed))
        ):
            self._word = word + char
        else:
            self.status = "broken"
            return 0
        return 1

    def _take_key(self, word: str) -> bool:
        """Whether the key comes for the first time."""
        self._key = _CALL_KEYS[word]
        is_new = self._key not in self._seen
        self._seen.add(self._key)
        return is_new

    def _punctuation(self, char: str) -> bool:
        expect = self._expect
        if char == '"' and (expect in ("key", "key_or_end") or (expect == "value" and self._key != "arguments")):
            self._word = ""
        elif char == ":" and expect == "colon":
            self._expect = "value"
        elif char == "," and expect == "next":
            self._expect = "key"
        elif char == "}" and expect == "next" and self.name is not None:
            self._new.append("{}" if self._arguments is None else "}")
            self.status = "done"
        else:
            return False
        return True
