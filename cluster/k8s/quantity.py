"""PURE. Kubernetes quantities: `500m`, `64Gi`, `2`."""

from __future__ import annotations

import re

_FORM = re.compile(r"^([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))(?:([eE][+-]?[0-9]+)|(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?)$")
_DECIMAL = {name: 1000.0**power for power, name in enumerate(["", "k", "M", "G", "T", "P", "E"])}
_BINARY = {f"{name}i": 1024.0**power for power, name in enumerate(["", "K", "M", "G", "T", "P", "E"]) if name}


def quantity(value: int | float | str) -> float:
    """The number that is meant. Raises ValueError for what is no quantity."""
    if isinstance(value, int | float):
        return float(value)
    found = _FORM.match(value)
    if found is None:
        raise ValueError(f"{value!r} is no quantity; allowed: a number, with a unit as in 500m, 2, 64Gi")
    number, exponent, unit = found.groups()
    if exponent:
        return float(number + exponent)
    factor = 0.001 if unit == "m" else _BINARY.get(unit or "", _DECIMAL.get(unit or "", 1.0))
    return float(number) * factor
