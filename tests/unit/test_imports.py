"""The arrows between packages and the promise in each module's first line (PURE, ASYNC, TORCH, RAY) hold.

Two looks at the same thing. Reading the source finds what a PURE module names, in functions too. Importing in a fresh
process finds what a module pulls in through others. Measured: pydantic, msgspec and numpy load neither asyncio, ssl
nor multiprocessing, so these can be held for PURE modules; socket (pydantic looks for plugins through
importlib.metadata, which loads it), threading (logging) and random (tempfile) come in innocent company and are held
by reading only.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("replica", "router", "cluster")
TAGS = ("PURE", "ASYNC", "TORCH", "RAY")
#: what router may know of replica
CONTRACT = {
    "replica",
    "replica.messages",
    "replica.kv_tier",
    "replica.permit_messages",
    "replica.hand_over_messages",
    "replica.stages",
    "replica.block_hash",
    "replica.errors",
    "replica.stream_proof",
}

#: third parties a PURE module may name (yaml: configuration is read by a PURE module, and it loads nothing forbidden;
#: llguidance: a function of grammar and text, starts no threads of its own)
PURE_THIRD_PARTY = {"numpy", "pydantic", "msgspec", "typing_extensions", "yaml", "llguidance"}
#: clocks, randomness without a seed, threads, sockets: a PURE module gets time as an argument and randomness as a seed
PURE_FORBIDDEN_NAMES = (
    "asyncio",
    "concurrent",
    "datetime.date.today",
    "datetime.datetime.now",
    "datetime.datetime.today",
    "datetime.datetime.utcnow",
    "http",
    "multiprocessing",
    "numpy.random",
    "os.urandom",
    "queue",
    "random",
    "secrets",
    "selectors",
    "signal",
    "socket",
    "socketserver",
    "ssl",
    "subprocess",
    "threading",
    "time",
    "urllib.request",
    "uuid.uuid1",
    "uuid.uuid4",
)
#: exceptions to the above: they take a seed, or are types only
PURE_ALLOWED_NAMES = ("random.Random", "numpy.random.Generator", "numpy.random.Philox", "numpy.random.default_rng")
#: what no import of a module with this tag may load, directly or not
NOT_LOADED = {
    "PURE": {
        "ray",
        "torch",
        "transformers",
        "tokenizers",
        "grpc",
        "starlette",
        "asyncio",
        "ssl",
        "multiprocessing",
    },
    "ASYNC": {"ray"},
    "TORCH": {"ray"},
    "RAY": set[str](),
}


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the three packages, by dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


def tag(name: str) -> str | None:
    """The first word of the module's docstring, if it is one of the four."""
    match = re.match(r"(PURE|ASYNC|TORCH|RAY)\b", ast.get_docstring(tree(name)) or "")
    return match.group(1) if match else None


def pure_modules() -> list[str]:
    return [name for name in modules() if tag(name) == "PURE"]


def test_the_three_packages_are_found() -> None:
    assert {"replica.messages", "replica.errors", "cluster", "router"} <= modules().keys()


def test_every_module_says_what_it_is() -> None:
    untagged = [name for name in modules() if tag(name) is None]
    assert untagged == [], f"the first line of the docstring must begin with one of {', '.join(TAGS)}"


def _outside_type_checking(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`, whose imports never run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from _outside_type_checking(other)
            continue
        yield child
        yield from _outside_type_checking(child)


def names_used(module: ast.Module) -> set[str]:
    """Dotted names a module imports, and those it reaches through what it imported (`np.random.rand` in full)."""
    nodes = list(_outside_type_checking(module))
    alias: dict[str, str] = {}
    used: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for item in node.names:
                used.add(item.name)
                alias[item.asname or item.name.split(".")[0]] = item.name if item.asname else item.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            for item in node.names:
                used.add(f"{node.module}.{item.name}")
                alias[item.asname or item.name] = f"{node.module}.{item.name}"
    for node in nodes:
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in alias:
            used.add(".".join([alias[node.id], *reversed(parts)]))
    return used


def _under(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def impurities(name: str, module: ast.Module) -> list[str]:
    """What a PURE module names and must not: clocks, threads, foreign packages, our own modules that are not PURE."""
    found = []
    for used in sorted(names_used(module)):
        root = used.split(".")[0]
        # a bare `import random` is no offence yet: what is reached through it is
        bare = used in ("random", "numpy.random")
        forbidden = _under(used, PURE_FORBIDDEN_NAMES) and not _under(used, PURE_ALLOWED_NAMES) and not bare
        foreign = root not in sys.stdlib_module_names | PURE_THIRD_PARTY | {*PACKAGES, "__future__"}
        own = next((m for m in (used, used.rpartition(".")[0]) if m in modules()), None)
        if forbidden or foreign or (own is not None and tag(own) != "PURE"):
            found.append(f"{name} uses {used}")
    return found


def test_pure_modules_name_nothing_impure() -> None:
    offences = [offence for name in pure_modules() for offence in impurities(name, tree(name))]
    assert offences == [], "\n".join(offences)


@pytest.mark.parametrize(
    ("source", "offends"),
    [
        ("import time", True),
        ("from time import monotonic", True),
        ("def f():\n    import asyncio", True),
        ("import random\nrandom.random()", True),
        ("from random import shuffle", True),
        ("import random\nrandom.Random(7).random()", False),
        ("import numpy as np\nnp.random.rand()", True),
        ("import numpy as np\nnp.random.default_rng(7)", False),
        ("from datetime import datetime\ndatetime.now()", True),
        ("from uuid import uuid4", True),
        ("import torch", True),
        ("import jinja2", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", False),
        (
            "from __future__ import annotations\nimport heapq\nimport numpy as np\nfrom replica.messages import Submit",
            False,
        ),
    ],
)
def test_the_check_itself(source: str, offends: bool) -> None:
    assert bool(impurities("m", ast.parse(source))) is offends


# ---- what importing really loads ----------------------------------------------------------------------------------

IMPORT_ONE_BY_ONE = """
import importlib, json, sys
loaded = {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    roots = {m.split(".")[0] for m in sys.modules}
    own = [m for m in sys.modules if m.split(".")[0] in ("replica", "router", "cluster")]
    loaded[name] = {"roots": sorted(roots), "own": sorted(own)}
print(json.dumps(loaded))
"""


def import_command(package: str) -> list[str]:
    """Its modules one after another, PURE first."""
    names = [
        n for t in TAGS for n in modules() if n.split(".")[0] == package and tag(n) == t and not n.endswith("__main__")
    ]
    return [sys.executable, "-c", IMPORT_ONE_BY_ONE, *names]


@pytest.fixture(scope="module")
def importing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[subprocess.Popen[bytes], Path]]]:
    """A process for each package, all at once: they take 5 s in turn. What each says goes to a file."""
    folder, running = tmp_path_factory.mktemp("imports"), {}
    for package in PACKAGES:
        path = folder / package
        with path.open("wb") as file:
            command = import_command(package)
            running[package] = (subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT), path)
    yield running
    for process, _ in running.values():
        process.kill()
        process.wait()


@pytest.fixture(scope="module", params=PACKAGES)
def loaded(
    request: pytest.FixtureRequest, importing: dict[str, tuple[subprocess.Popen[bytes], Path]]
) -> tuple[str, dict[str, dict[str, list[str]]]]:
    """One package's modules, imported in a fresh process one after another: what is loaded after each."""
    package: str = request.param
    process, path = importing[package]
    code, said = process.wait(), path.read_text(encoding="utf-8")
    assert code == 0, said
    return package, json.loads(next(line for line in reversed(said.splitlines()) if line.startswith("{")))


@pytest.mark.timeout(180)  # the first one waits for all three processes, 5 s on two idle cores
def test_importing_loads_only_what_the_tag_allows(loaded: tuple[str, dict[str, dict[str, list[str]]]]) -> None:
    package, after = loaded
    before: set[str] = set()
    offences = []
    for name, state in after.items():
        roots = set(state["roots"])
        forbidden = set(NOT_LOADED[tag(name) or "PURE"])
        if package == "router":
            forbidden.add("torch")  # import of torch costs 1.7 s and 200 MB: a router never pays it
        offences += [f"importing {name} loads {root}" for root in sorted((roots - before) & forbidden)]
        before = roots
    assert offences == [], "\n".join(offences)


def test_importing_follows_the_arrows(loaded: tuple[str, dict[str, dict[str, list[str]]]]) -> None:
    package, after = loaded
    own = {module for state in after.values() for module in state["own"]}
    others = {module for module in own if module.split(".")[0] != package}
    allowed = {"replica": set(), "router": CONTRACT, "cluster": others}[package]
    assert others - allowed == set()
