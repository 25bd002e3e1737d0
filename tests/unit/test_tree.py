"""Rules about the files of the repository themselves."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from cluster import __version__

ROOT = Path(__file__).resolve().parents[2]
SKIPPED_FOLDERS = {".git", ".venv", ".venv-clients", "__pycache__", "build", "dist", ".cache", ".hypothesis"}


def project_files() -> list[Path]:
    """Files git tracks or would track; without git, everything but what tools leave behind."""
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        return [ROOT / name for name in listed if name and (ROOT / name).is_file()]
    found = []
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [n for n in subfolders if n not in SKIPPED_FOLDERS and not n.endswith(("_cache", ".egg-info"))]
        found += [Path(folder, name) for name in names]
    return found


def lines_matching(pattern: str, paths: list[Path]) -> list[str]:
    found = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a binary file
        numbered = enumerate(text.splitlines(), 1)
        found += [
            f"{path.relative_to(ROOT)}:{n}: {line.strip()[:120]}" for n, line in numbered if re.search(pattern, line)
        ]
    return found


# The patterns hold a character class in the middle, so that they do not match themselves.


def test_no_test_sleeps() -> None:
    """Order is forced by events or by a virtual clock, never by waiting; a turn of the loop `(0)` is no wait."""
    tests = [path for path in project_files() if path.suffix == ".py" and path.is_relative_to(ROOT / "tests")]
    assert len(tests) > 3
    assert lines_matching(r"\bslee[p]\s*\((?!0\))", tests) == []


def test_no_file_names_a_path_of_one_machine() -> None:
    """Neither somebody's checkout nor somebody's scratch folder. Ray's own session folder is a documented constant."""
    assert (
        lines_matching(
            r"(?<![\w.-])/(?:wor[k]|far[m]|roo[t]|hom[e]|User[s])/|/tm[p]/(?!ray\b)|/tm[p]\b(?=[\"'\s])",
            project_files(),
        )
        == []
    )


def test_no_file_names_a_registry_host() -> None:
    """Which index packages come from is the business of the machine's own configuration."""
    hosts = r"pyp[i]\.org|pythonhoste[d]|npmj[s]|download\.pytorc[h]|deb\.debia[n]|crates\.i[o]|proxy\.golan[g]"
    assert lines_matching(hosts, project_files()) == []


def test_no_relative_helper_dump() -> None:
    assert [path for path in project_files() if path.name in ("utils.py", "helpers.py", "common.py")] == []


def pyproject() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def normal(name: str) -> str:
    """A distribution's name as the index compares it, without version and extras."""
    match = re.match(r"[A-Za-z0-9._-]+", name)
    assert match
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def declared(*extras: str) -> set[str]:
    project = pyproject()["project"]
    assert isinstance(project, dict)
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return {normal(requirement) for requirement in wanted}


def third_party_imports(folders: tuple[str, ...]) -> dict[str, str]:
    """Root of every foreign import, in functions too, and the first file that has it."""
    found: dict[str, str] = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name == "engine_rival.py":
                continue  # runs in the environment of a rival, not in ours
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [item.name for item in node.names] if isinstance(node, ast.Import) else []
                for root in {name.split(".")[0] for name in names}:
                    if root not in sys.stdlib_module_names:
                        found.setdefault(root, str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize(
    ("folders", "extras"),
    [
        (("cluster", "router", "replica"), ("gpu",)),
        (("tests", "benchmarks", "examples", "k8s"), ("gpu", "dev")),
    ],
)
def test_every_import_is_declared(folders: tuple[str, ...], extras: tuple[str, ...]) -> None:
    """What the code imports stands in pyproject.toml, and is not just there because something else needs it."""
    ours = {"cluster", "router", "replica", "tests", "benchmarks", "examples", "k8s"}
    distributions = packages_distributions()
    # clients that are only driven have an environment of their own
    lines = (ROOT / "tests" / "clients" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    known = declared(*extras) | {normal(line) for line in lines if "==" in line}
    missing = {}
    for root, where in third_party_imports(folders).items():
        candidates = {normal(name) for name in distributions.get(root, [root])}
        if root not in ours and not candidates & known:
            missing[root] = where
    assert missing == {}


def test_every_dependency_is_pinned_in_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {normal(line) for line in lines if "==" in line and not line.startswith("#")}
    assert declared("dev") - pins == set()


def test_gpu_constraints_follow_the_wheel() -> None:
    """vllm-flash-attn 2.6.2 was built for, and pins, torch 2.4.0."""
    text = (ROOT / "constraints-gpu.txt").read_text(encoding="utf-8")
    assert "torch==2.4.0" in text.splitlines()
    assert "vllm-flash-attn==2.6.2" in text.splitlines()
    assert declared("gpu") - declared() == {"vllm-flash-attn"}


def test_make_targets_are_scripts() -> None:
    """Every target but help calls the script of its name, which is executable and parses."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):.*##", makefile, re.MULTILINE))
    assert {"serve", "test", "check", "bench", "claims", "soak", "clean", "help", "setup"} == targets
    for target in targets - {"help"}:
        script = ROOT / "scripts" / target
        assert f"scripts/{target}" in makefile
        assert os.access(script, os.X_OK), f"{script} is not executable"
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_modules_that_scripts_run_exist() -> None:
    named = {
        m for path in (ROOT / "scripts").iterdir() for m in re.findall(r"python\" -m ([a-z_.]+)", path.read_text())
    }
    assert {"benchmarks.serving", "benchmarks.claims", "cluster.model_store"} <= named
    ours = [name for name in named if name.startswith(("benchmarks.", "cluster.", "router.", "replica."))]
    assert [n for n in ours if not (ROOT / (n.replace(".", "/") + ".py")).is_file()] == []


def test_ci_runs_what_people_run() -> None:
    run = ROOT / ".ci" / "run"
    assert os.access(run, os.X_OK)
    assert "make test" in run.read_text(encoding="utf-8")


def test_papers() -> None:
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").split()[:3] == ["Apache", "License", "Version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in changelog or f"## [{__version__}]" in changelog
