"""Fuzz one target, guided by the coverage of our own modules: ``python -m fuzz.one TARGET ARGUMENTS...``.

Arguments are libFuzzer's. The process ends with the first finding.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import atheris
import msgspec

EXTREMES: tuple[Any, ...] = (
    -1, 0, 1, 2**32, 2**40, 2**40 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -0.0, 1e15, 1.7e308, float("inf"),
    float("nan"), "", "a\n", "x" * 257, "__other__", [], [[]], {}, None, True, b"", "9" * 64,
)  # fmt: skip
DEPTH = 12


def main() -> None:
    """Set up and run the fuzzer; never returns."""
    with atheris.instrument_imports(include=["sidestep"]):
        from fuzz.targets import BY_NAME, chunks, joined  # noqa: PLC0415 - instrumented as it is imported

    target = BY_NAME[sys.argv[1]]

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        """Replace, repeat or drop one chunk, or let libFuzzer mutate the bytes."""
        chance = random.Random(seed)
        found = chunks(data)
        if not found or chance.random() < 0.4:
            return bytes(atheris.Mutate(data, most))
        at = chance.randrange(len(found))
        deed = chance.random()
        if deed < 0.1:
            found.insert(at, chance.choice(found))
        elif deed < 0.15:
            del found[at]
        else:
            found[at] = _changed(found[at], chance, sender=target.name == "frames")
        made = joined([chunk for chunk in found if len(chunk) < 1 << 16])
        return made if len(made) <= most else data

    arguments = [sys.argv[0], *sys.argv[2:]]
    if target.name == "web":
        atheris.Setup(arguments, target.run)
    else:
        atheris.Setup(arguments, target.run, custom_mutator=mutate)
    atheris.Fuzz()


def _changed(chunk: bytes, chance: random.Random, *, sender: bool) -> bytes:
    """Return ``chunk`` with another value in one place; msgpack stays msgpack."""
    head, body = (chunk[:1], chunk[1:]) if sender else (b"", chunk)
    try:
        plain = msgspec.msgpack.decode(body)
        return head + msgspec.msgpack.encode(_with(plain, chance, DEPTH))
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError, TypeError):
        return bytes(atheris.Mutate(chunk, len(chunk) + 8))


def _with(value: Any, chance: random.Random, depth: int) -> Any:
    if depth and isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        if chance.random() < 0.1:
            return [*value[:at], *[value[at]] * chance.choice([0, 2, 3, 70]), *value[at + 1 :]]
        value[at] = _with(value[at], chance, depth - 1)
        return value
    if depth and isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        value[key] = _with(value[key], chance, depth - 1)
        return value
    if isinstance(value, int) and chance.random() < 0.5:
        return max(value + chance.choice([-1, 1, 7]), 0)
    if isinstance(value, float) and chance.random() < 0.5:
        return value + chance.choice([-100.0, -0.001, 0.0, 0.5, 30.0, 90_000.0])
    return chance.choice(EXTREMES)


if __name__ == "__main__":
    main()
