"""Files of YAML documents: limits on what a small file can cost, and one-line errors."""

from __future__ import annotations

import tracemalloc

import pytest

from sidestep.config.yaml_reader import MAX_ALIASED, MAX_NESTED, read_documents
from sidestep.errors import ConfigError

MOST_BYTES = 16 << 20
"""Most memory that reading one of these files may take."""


def levels(first: str, each: str) -> str:
    """Return nine levels, of which each repeats the one below it nine times."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{i}: &a{i} {each.format(', '.join([f'*a{i - 1}'] * 9))}" for i in range(1, 9)]
    return "\n".join(lines)


HOSTILE = {
    "aliases of aliases": levels("[x, x, x]", "[{}]"),
    "merge keys of merge keys": levels("{k: v, l: w}", "{{<<: [{}]}}"),
    "many aliases of a long list": f"a: &a [{'x, ' * 2000}x]\nb: [{'*a, ' * 2000}x]",
    "a list in itself": "kind: Pod\nspec: &a [*a]",
    "a mapping in itself": "kind: Pod\nspec: &a {b: {c: *a}}",
    "deep lists": "[" * 5000,
    "deep mappings": "".join(f"{' ' * i}a:\n" for i in range(MAX_NESTED + 20)),
    "deep by aliases": "a0: &a0 [x]\n"
    + "\n".join(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 5000)),
    "a list as a key": "? [a]\n: b",
    "no such date": "a: 0o9\nb: 2024-99-99T99:99:99Z\nc: 1_0:99.\nd: !!timestamp 2024-99-99",
    "an unknown alias": "a: *b",
    "a tag of Python": "a: !!python/object/apply:os.system [x]",
    "an escape sequence": "a: \x1b]0;title\x07",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_documents(text: str) -> None:
    """Each is refused in one line, before memory is taken."""
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="is not YAML") as refused:
            list(read_documents(text))
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    assert str(refused.value).isprintable()


def test_aliases_of_ordinary_files_are_read() -> None:
    """Anchors and merge keys have the values that YAML gives them."""
    text = "a: &a {x: 1, d: 2024-01-01}\nb: {<<: *a, y: =}\n---\nc: [*a]"
    first, second = read_documents(text.replace("c: [*a]", "c: &c [1]\nd: [*c, *c]"))

    assert first["b"] == {"x": 1, "d": "2024-01-01", "y": "="}
    assert second == {"c": [1], "d": [[1], [1]]}
    anchors = "a: &a [" + "x, " * 999 + "x]\n"
    assert list(read_documents(anchors + "b: [" + "*a, " * (MAX_ALIASED // 1001 - 1) + "x]"))
