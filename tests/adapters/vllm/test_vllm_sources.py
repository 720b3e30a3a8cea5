"""The fields that are read, in the Python sources of a vLLM: the newest one's of ``make vllm-sources``."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from sidestep_adapters.vllm.stats import FIELDS

ROOT = Path(__file__).parents[3]
OTHER_NAMES = {
    "CacheStats": "PrefixCacheStats",
    "mm_cache": "MultiModalCacheStats",
}
"""Classes of vLLM's by the struct's name, or by the path, where they are not called as the struct."""


def found_sources() -> Iterator[Path]:
    """Yield the folder ``vllm`` of the newest sources that were unpacked, or of installed ones."""
    yield from ROOT.glob("build/vllm-sources/vllm")
    yield from ROOT.glob("build/vllm-venv/lib/python3*/site-packages/vllm")
    spec = importlib.util.find_spec("vllm")
    yield from map(Path, spec.submodule_search_locations or ()) if spec is not None else ()


@pytest.fixture(scope="module")
def classes() -> dict[str, ast.ClassDef]:
    """Return the classes of the engine's statistics by name."""
    sources = next(found_sources(), None)
    if sources is None:
        pytest.skip("no sources of vLLM: make vllm-sources")
    files = [*sources.glob("v1/metrics/*.py"), sources / "v1/spec_decode/metrics.py"]
    files += [sources / "compilation/cuda_graph.py"]
    trees = (ast.parse(file.read_text()) for file in files)
    return {c.name: c for tree in trees for c in tree.body if isinstance(c, ast.ClassDef)}


def fields(classes: dict[str, ast.ClassDef], name: str) -> set[str]:
    """Return the attributes that objects of a class have."""
    found: set[str] = set()
    for each in classes[name].body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found.add(each.target.id)
        elif isinstance(each, ast.FunctionDef) and each.name == "__init__":
            found |= set(assigned(ast.walk(each)))
        elif isinstance(each, ast.FunctionDef) and "property" in map(
            ast.unparse, each.decorator_list
        ):
            found.add(each.name)
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
    return found.union(*(fields(classes, base) for base in bases if base in classes))


def assigned(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names of attributes that are assigned."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


@pytest.mark.parametrize("path", [path for path, _ in FIELDS.structs()])
def test_vllm_has_each_field_that_is_read(path: str, classes: dict[str, ast.ClassDef]) -> None:
    """A field that is gone is renamed, or its metrics need another source: see RENAMED_FIELDS."""
    struct = dict(FIELDS.structs())[path]
    name = OTHER_NAMES.get(path) or OTHER_NAMES.get(struct.__name__, struct.__name__)
    has = fields(classes, name)
    gone = {
        field
        for field in set(struct.__struct_fields__) - has
        if f"{path}.{field}" not in FIELDS.unread
        and FIELDS.substitutes.get(f"{path}.{field}") not in has
    }
    assert gone == set()
