"""PURE. Tool calls in the text of a chat answer, as it arrives.

Between calls a table of markers for each format says what may come next; a call itself is `json_scan.CallObject`. What
is a call, and what comes out of the rest:

- Hermes: `<tool_call>` anywhere, then the object. The closing tag is taken when it follows; a complete object is a call
  also without it (a stop token may stand for the tag).
- Llama 3: the object at the very beginning of the answer or behind `<|python_tag|>`; more of them behind `;` or white
  space, or all in one JSON array. JSON later in a text is text.
- The object has `name`, one of the names that may be called; `arguments` or `parameters`, an object (absent: `{}`); and
  may have strings `type` and `id`, which say nothing. Keys and names count as they are written, without escapes.
- Whatever turns out to be no call is content, exactly as written: broken JSON, another name or key, an end in the
  middle. White space around calls is dropped, other text is content.

With `streams`, arguments come out as they arrive, once the name is known. A call that breaks after that leaves an
incomplete call with the client (never with whole arguments): its index is used up, it is not counted, and its text is
content as well. Without `streams` a call comes out when it is complete. Content and complete calls are the same in
both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from router.json_scan import SPACE, CallObject
from router.message_parts import MessageDelta, ToolCallDelta, ToolFormat
from router.tool_grammar import PYTHON_TAG, TOOL_CLOSE, TOOL_OPEN

#: state -> marker -> next state. `text`: the marker may come anywhere. Elsewhere only white space may stand before one,
#: and what is none of them begins text. `call` and `list_call` are inside of an object. What leads to `closed` is never
#: content.
_HERMES = {
    "begin": {TOOL_OPEN: "opened"},
    "text": {TOOL_OPEN: "opened"},
    "opened": {"{": "call"},
    "after": {TOOL_CLOSE: "closed", TOOL_OPEN: "opened"},
    "closed": {TOOL_OPEN: "opened"},
}
_LLAMA3_JSON = {
    "begin": {PYTHON_TAG: "opened", "{": "call", "[": "list"},
    "text": {PYTHON_TAG: "opened"},
    "opened": {"{": "call", "[": "list"},
    "after": {";": "more", PYTHON_TAG: "opened", "{": "call"},
    "more": {PYTHON_TAG: "opened", "{": "call"},
    "list": {"{": "list_call"},
    "after_in_list": {",": "list", "]": "closed"},
    "closed": {";": "more", PYTHON_TAG: "opened", "{": "call"},
}
_TABLES: dict[ToolFormat, dict[str, dict[str, str]]] = {"hermes": _HERMES, "llama3_json": _LLAMA3_JSON}
_AFTER_CALL = {"call": "after", "list_call": "after_in_list"}
_AFTER_ANY = frozenset({"after", "after_in_list", "closed"})


def held_back(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`, but not all of it."""
    start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while start >= 0:
        if marker.startswith(text[start:]):
            return len(text) - start
        start = text.find(marker[0], start + 1)
    return 0


class ToolCallParser:
    """Content and tool calls of one choice. `new_id` gives the random part of an id."""

    def __init__(
        self, tool_format: ToolFormat, names: Collection[str], new_id: Callable[[], str], streams: bool = True
    ) -> None:
        self._table = _TABLES[tool_format]
        self._names = names
        self._new_id = new_id
        self._streams = streams
        self._state = "begin"
        #: read, and content if it comes to nothing
        self._held: list[str] = []
        #: not read yet: it may become a marker
        self._rest = ""
        self._call: CallObject | None = None
        #: the client knows of the call that is being read
        self._is_told = False
        self._next_index = 0
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self.num_tool_calls = 0

    def push(self, text: str) -> MessageDelta:
        """New text of the choice."""
        self._rest += text
        while self._rest and self._advance():
            pass
        return self._take()

    def flush(self) -> MessageDelta:
        """The choice has ended. White space behind the last call is dropped; a call that had begun stays as far as it
        came (OpenAI's form of an answer cut by its length); else what was held back is content.
        """
        if self._call is not None and self._call.has_begun:
            self._tell(self._call)
            self._held.clear()
            self._state = "text"
            self._end_call()
        elif self._state not in _AFTER_ANY or self._rest.strip(SPACE):
            self._held.append(self._rest)
            self._to_text()
        self._rest = ""
        return self._take()

    def _advance(self) -> bool:
        """Read on in `_rest`; False when it takes more text to go on."""
        if self._call is not None:
            self._read_call(self._call)
            return True
        if self._state == "text":
            return self._read_text()
        return self._read_gap()

    def _read_text(self) -> bool:
        rest, markers = self._rest, self._table["text"]
        for marker, state in markers.items():
            at = rest.find(marker)
            if at >= 0:
                self._content.append(rest[:at])
                self._rest = rest[at:]
                self._take_marker(len(marker), state)
                return True
        cut = len(rest) - max(held_back(rest, marker) for marker in markers)
        self._content.append(rest[:cut])
        self._rest = rest[cut:]
        return False

    def _read_gap(self) -> bool:
        ahead = self._rest.lstrip(SPACE)
        num_spaces = len(self._rest) - len(ahead)
        for marker, state in self._table[self._state].items():
            if ahead.startswith(marker):
                self._take_marker(num_spaces + len(marker), state)
                return True
            if marker.startswith(ahead):
                return False
        self._to_text()
        return True

    def _take_marker(self, end: int, state: str) -> None:
        self._held.append(self._rest[:end])
        self._rest = self._rest[end:]
        self._state = state
        if state in _AFTER_CALL:
            self._call = CallObject(self._names)
        elif state == "closed":
            self._held.clear()

    def _read_call(self, call: CallObject) -> None:
        end = call.push(self._rest, 0)
        self._held.append(self._rest[:end])
        self._rest = self._rest[end:]
        if call.status == "done" or (self._streams and call.has_begun):
            self._tell(call)
        if call.status == "broken":
            self._to_text()
        elif call.status == "done":
            self._held.clear()
            self._state = _AFTER_CALL[self._state]
            self.num_tool_calls += 1
            self._end_call()

    def _tell(self, call: CallObject) -> None:
        arguments, index = call.take_arguments(), self._next_index
        if not self._is_told:
            self._is_told = True
            self._deltas.append(ToolCallDelta(index, arguments, "call_" + self._new_id(), call.name))
        elif arguments:
            self._deltas.append(ToolCallDelta(index, arguments))

    def _end_call(self) -> None:
        self._next_index += self._is_told
        self._is_told = False
        self._call = None

    def _to_text(self) -> None:
        """What is held has come to nothing."""
        self._content += self._held
        self._held.clear()
        self._state = "text"
        self._end_call()

    def _take(self) -> MessageDelta:
        delta = MessageDelta("".join(self._content), "", tuple(self._deltas))
        self._content.clear()
        self._deltas.clear()
        return delta
