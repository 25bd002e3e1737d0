"""PURE. How much work a JSON schema may make, decided by looking at it before llguidance compiles it.

llguidance bounds most of its work by itself, but not all (1.9.1, measured): a chain of about 1,000 references
overflows the stack and kills the process; `multipleOf: 999983` takes 7 s and 450 MB; 60 patterns joined by `allOf`
take all memory; five kilobytes of `allOf` over references that fork take 5.5 s and 2.7 GB. The limits here keep each
schema below about a second, and leave schemas that people write far inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from router.sentences import WrongValueError, short

#: levels of JSON; llguidance's reader stops at 128, some of which are around the schema
MAX_DEPTH = 100
#: schemas inside of the schema and values of enums, after `allOf` and references with siblings are written out
MAX_NODES = 8192
#: of one object; the work grows with the square
MAX_PROPERTIES = 1024
MAX_PATTERN_PROPERTIES = 32
#: levels of all definitions that may be entered one inside of the other
MAX_REFERENCE_DEPTH = 400
#: different patterns and formats of one property, where schemas are joined
MAX_JOINED_PATTERNS = 4
#: sum of the integers behind `multipleOf` (0.25 counts 25)
MAX_MULTIPLES = 50_000

_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "dependentSchemas")
_SINGLES = (
    "items",
    "additionalProperties",
    "additionalItems",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
#: keywords that do not keep `$ref`, `allOf`, `anyOf` or `oneOf` beside them from being taken as they are
_ANNOTATIONS = frozenset(
    {
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
_JOINING = ("allOf", "anyOf", "oneOf", "$ref")


#: the largest number that a float still tells from its neighbours
MAX_NUMBER = 1 << 53
#: formats that llguidance enforces; others are annotations, as JSON Schema has them (pydantic writes `binary`)
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})


def is_deeper(value: object, levels: int) -> bool:
    """Whether a JSON value has more levels than that. Without recursion: it may be nested as deep as a body may."""
    row: list[object] = [value]
    for _ in range(levels):
        row = [
            item
            for inner in row
            if isinstance(inner, (list, dict))
            for item in (inner if isinstance(inner, list) else inner.values())
        ]
        if not row:
            return False
    return True


def closed(schema: Any) -> Any:
    """A copy in which objects that list properties allow no others, unless they say what others may be; unknown formats
    are left out.

    What fits the copy fits the schema. An open object is what a model never gets out of, and clients such as
    instructor send open ones (pydantic's default) and expect an end; vLLM's grammars close them too. Nothing is closed
    where `allOf` occurs, and no object whose properties are joined with those of another schema: that could leave
    nothing that fits.
    """
    return _closed(schema, closes=not _has_key(schema, "allOf"))


def _has_key(schema: Any, key: str) -> bool:
    if isinstance(schema, dict):
        return key in schema or any(_has_key(item, key) for item in schema.values())
    return isinstance(schema, list) and any(_has_key(item, key) for item in schema)


def _closed(schema: Any, closes: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in FORMATS:
            continue
        if key in _MAPS or key in ("$defs", "definitions"):
            names = value.items() if isinstance(value, dict) else ()
            result[key] = {name: _closed(item, closes) for name, item in names} if names else value
        elif key in _LISTS or key in _SINGLES:
            is_list = isinstance(value, list)
            result[key] = [_closed(item, closes) for item in value] if is_list else _closed(value, closes)
        else:
            result[key] = value
    lists = "properties" in result or "patternProperties" in result
    if closes and lists and not any(key in result for key in _JOINING):
        result.setdefault("additionalProperties", False)
    return result


def check_schema(schema: object, where: str) -> float:
    """Raises `WrongValueError` when compiling `schema` could take too much. `where` names it in the sentence. Returns
    how much of what is allowed it takes, from 0 to 1.
    """
    if is_deeper(schema, MAX_DEPTH):
        raise WrongValueError(f"{where} is nested deeper than {MAX_DEPTH} levels; allowed: less.")
    _check_values(schema, where)
    look = _Look(schema, where)
    look.definitions()
    try:
        num_nodes = look.num_nodes()
    except RecursionError:
        num_nodes = math.inf
    if not num_nodes <= MAX_NODES:  # also when it is no number any more
        raise WrongValueError(
            f"{where} is too large: with its references and allOf written out it has more than {MAX_NODES} parts; "
            f"allowed: at most that."
        )
    return max(num_nodes / MAX_NODES, look.check_counts())


def _check_values(schema: object, where: str) -> None:
    """What llguidance would follow wrongly: it reads numbers as floats (beyond 2^53 they become others, and bounds near
    -2^63 kill the process), and it counts equal keys for `minProperties`.
    """
    if isinstance(schema, list):
        for item in schema:
            _check_values(item, where)
    elif isinstance(schema, dict):
        wanted = schema.get("minProperties")
        required = schema.get("required")
        num_required = len(required) if isinstance(required, list) else 0
        if isinstance(wanted, int) and wanted > max(num_required, 1):
            raise WrongValueError(
                f"{where} has minProperties {short(wanted)} with {num_required} required properties; allowed: at most "
                "as many as are required, or 1."
            )
        for key, item in schema.items():
            if key not in _ANNOTATIONS:
                _check_values(item, where)
    elif isinstance(schema, (int, float)) and not -MAX_NUMBER <= schema <= MAX_NUMBER:
        raise WrongValueError(f"{where} has the number {short(schema)}; allowed: from -2^53 to 2^53.")


def _children(node: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(keyword, name, schema) of each schema directly inside, definitions apart."""
    for key in _MAPS:
        inner = node.get(key)
        if isinstance(inner, dict):
            for name, child in inner.items():
                yield key, name, child
    for key in (*_LISTS, *_SINGLES):
        inner = node.get(key)
        for child in inner if isinstance(inner, list) else [inner]:
            if isinstance(child, dict):
                yield key, "", child


def _num_values(value: object) -> int:
    """Values in `enum` or `const`, nested ones included. Recursion is bounded by `MAX_DEPTH`."""
    if isinstance(value, (list, dict)):
        return 1 + sum(map(_num_values, value if isinstance(value, list) else value.values()))
    return 1


def _is_join(node: dict[str, Any]) -> bool:
    """Whether two schemas hold for one value here, so that their parts are joined pair by pair."""
    members = sum(len(node[key]) if key == "allOf" else 1 for key in _JOINING if isinstance(node.get(key), (list, str)))
    return members > 1 or (members == 1 and not _ANNOTATIONS.issuperset(node.keys() - set(_JOINING)))


class _Look:
    """What is seen in one schema: the root and every target of a reference, each looked at once."""

    def __init__(self, root: object, where: str) -> None:
        self._root = root
        self._where = where
        #: pointer -> schema
        self.targets: dict[str, Any] = {"#": root}
        self._has_joins = False
        self._num_pattern_properties = 0
        self._multiples: list[int] = []
        #: name of the innermost property -> its patterns and formats; "" for those of many or no names
        self._patterns: dict[str, set[str]] = {}
        self._sizes: dict[tuple[int, bool], tuple[float, float]] = {}
        self._open: set[int] = set()
        self._referred: set[str] = set()

    def definitions(self) -> None:
        """Walk the root and all that is referred to. Raises `WrongValueError` for references that cannot be followed,
        or chains of them that are too long.
        """
        depths: dict[str, int] = {}
        refers: dict[str, set[str]] = {}
        waiting = ["#"]
        while waiting:
            pointer = waiting.pop()
            depths[pointer], refers[pointer] = self._walk(self.targets[pointer])
            for other in refers[pointer]:
                if other not in self.targets:
                    self.targets[other] = self._resolve(other)
                    waiting.append(other)
        if _longest_chain(depths, refers) > MAX_REFERENCE_DEPTH:
            raise WrongValueError(
                f"{self._where} has references that lead more than {MAX_REFERENCE_DEPTH} levels deep; allowed: less."
            )

    def _resolve(self, pointer: str) -> Any:
        value = self._root
        for step in pointer.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and name.isdecimal() and len(name) < 9 and int(name) < len(value):
                value = value[int(name)]
            elif isinstance(value, dict) and name in value:
                value = value[name]
            else:
                raise WrongValueError(f"{self._where} refers to {short(pointer)}, which is not there.")
        return value

    def _walk(self, start: object) -> tuple[int, set[str]]:
        """Levels below `start`, and the pointers it refers to."""
        deepest, refers = 1, set[str]()
        stack: list[tuple[object, int, str]] = [(start, 1, "")]
        while stack:
            node, depth, name = stack.pop()
            if not isinstance(node, dict):
                continue
            deepest = max(deepest, depth)
            reference = node.get("$ref")
            if isinstance(reference, str):
                if reference != "#" and not reference.startswith("#/"):
                    raise WrongValueError(
                        f"{self._where} has the reference {short(reference)}; allowed: into the schema itself, '#/...'."
                    )
                refers.add(reference)
            if isinstance(node.get("$id"), str) and node is not self._root:
                raise WrongValueError(f"{self._where} has $id inside; allowed: only at its top.")
            self._note(node, name)
            for key, child_name, child in _children(node):
                inner_name = child_name if key == "properties" else name if key in _JOINING else ""
                stack.append((child, depth + 1, inner_name))
        return deepest, refers

    def _note(self, node: dict[str, Any], name: str) -> None:
        self._has_joins |= _is_join(node)
        properties = node.get("properties")
        if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
            raise WrongValueError(
                f"{self._where} has an object of {len(properties)} properties; allowed: at most {MAX_PROPERTIES}."
            )
        named = node.get("patternProperties")
        self._num_pattern_properties += len(named) if isinstance(named, dict) else 0
        for key in ("pattern", "format"):
            if isinstance(node.get(key), str):
                self._patterns.setdefault(name, set()).add(key + node[key])
        multiple = node.get("multipleOf")
        if type(multiple) in (int, float) and multiple:  # a bool is llguidance's to refuse
            self._multiples.append(_digits(multiple))

    def num_nodes(self) -> float:
        """Parts of the root and of all that is referred to and not copied."""
        total, seen = 0.0, set[str]()
        self._referred = {"#"}
        while self._referred:
            pointer = self._referred.pop()
            seen.add(pointer)
            total += self.size(self.targets[pointer], False)[0]
            self._referred -= seen
        return total

    def size(self, node: object, joined: bool) -> tuple[float, float]:
        """(parts when written out, alternatives). `joined`: it stands in a join, which copies what it refers to."""
        if not isinstance(node, dict):
            return 1, 1
        known = self._sizes.get((id(node), joined))
        if known is not None:
            return known
        if id(node) in self._open:  # a circle: llguidance refers, or refuses
            return 1, 1
        self._open.add(id(node))
        is_join = _is_join(node)
        inside = joined or is_join
        own: float = 1 + sum(_num_values(node[key]) for key in ("enum", "const") if key in node)
        members: list[tuple[float, float]] = []
        for key in ("anyOf", "oneOf"):
            if isinstance(node.get(key), list):
                branches = [self.size(branch, inside) for branch in node[key]]
                members.append((sum(b[0] for b in branches), sum(b[1] for b in branches)))
        if isinstance(node.get("allOf"), list):
            members += [self.size(member, inside) for member in node["allOf"]]
        if isinstance(node.get("$ref"), str):
            if inside:
                members.append(self.size(self.targets[node["$ref"]], True))
            else:
                self._referred.add(node["$ref"])
        for key, _, child in _children(node):
            if key not in _JOINING:
                own += self.size(child, inside)[0]
        alternatives = math.prod(max(1.0, member[1]) for member in members)
        per_alternative = sum(member[0] / max(1.0, member[1]) for member in members)
        result = (own + alternatives * (per_alternative + (own if is_join else 0)), alternatives)
        self._open.discard(id(node))
        self._sizes[id(node), joined] = result
        return result

    def check_counts(self) -> float:
        """The largest share of a limit that is taken. Raises `WrongValueError`."""
        if self._num_pattern_properties > MAX_PATTERN_PROPERTIES:
            raise WrongValueError(
                f"{self._where} has {self._num_pattern_properties} patternProperties; "
                f"allowed: at most {MAX_PATTERN_PROPERTIES}."
            )
        work = sum(self._multiples)
        if self._has_joins and self._multiples:  # they may be joined to their least common multiple
            work = len(self._multiples) * math.lcm(*self._multiples)
        if work > MAX_MULTIPLES:
            raise WrongValueError(
                f"{self._where} has values of multipleOf that are too large together; "
                f"allowed: a sum of at most {MAX_MULTIPLES}, and a common multiple below it where schemas are joined."
            )
        everywhere = self._patterns.get("", set())
        most = max((len(found | everywhere) for found in self._patterns.values()), default=0)
        if self._has_joins and most > MAX_JOINED_PATTERNS:
            raise WrongValueError(
                f"{self._where} joins schemas (allOf, or keywords beside $ref or anyOf) and has {most} patterns for "
                f"one property; allowed: at most {MAX_JOINED_PATTERNS} then."
            )
        return max(self._num_pattern_properties / MAX_PATTERN_PROPERTIES, work / MAX_MULTIPLES)


def _digits(number: float) -> int:
    """The integer behind a decimal: 0.25 is 25, 1500 is 15."""
    if abs(number) > 1e15:  # too large whatever its digits are
        return MAX_MULTIPLES + 1
    return int("".join(map(str, Decimal(repr(number)).normalize().as_tuple().digits)))


def _longest_chain(depths: dict[str, int], refers: dict[str, set[str]]) -> int:
    """No chain of references is deeper than this. Exact without circles; what lies in or before one counts in full."""
    heights: dict[str, int] = {}
    callers: dict[str, list[str]] = {pointer: [] for pointer in depths}
    num_open = {pointer: len(others) for pointer, others in refers.items()}
    for pointer, others in refers.items():
        for other in others:
            callers[other].append(pointer)
    ready = [pointer for pointer, count in num_open.items() if not count]
    while ready:
        pointer = ready.pop()
        heights[pointer] = depths[pointer] + max((heights[other] for other in refers[pointer]), default=0)
        for caller in callers[pointer]:
            num_open[caller] -= 1
            if not num_open[caller]:
                ready.append(caller)
    in_circles = sum(depth for pointer, depth in depths.items() if pointer not in heights)
    return in_circles + max(heights.values(), default=0)
