"""How many examples the expensive property tests run: a part of them in `ci`, all of them with
`HYPOTHESIS_PROFILE=long`, as `scripts/soak` does.
"""

from __future__ import annotations

import os

IS_LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
#: of the examples of the long form
_SHARE = 0.4


def examples(long_form: int) -> int:
    """Each example is a whole life of many steps; the long form is what has found mistakes before."""
    return long_form if IS_LONG else max(5, int(_SHARE * long_form))
