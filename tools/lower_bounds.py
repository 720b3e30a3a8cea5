"""Print the requirements of an installation with every extra, at the lowest versions that pyproject.toml declares.

``--newest`` prints the same without versions. pip has no such resolution of its own.
Usage: lower_bounds.py --lowest|--newest
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import tomllib

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
FOR_DEVELOPERS = {"dev", "fuzz"}
REQUIREMENT = re.compile(r"([\w.-]+)>=([\w.]+)(;.*)?")


def requirements(*, lowest: bool) -> Iterator[str]:
    """Yield the requirements of the build, of the package and of its extras for users.

    Raises:
        ValueError: A requirement has no lower bound, or something besides it.
    """
    read = tomllib.loads(PROJECT.read_text())
    project = read["project"]
    extras = project["optional-dependencies"]
    lists = [read["build-system"]["requires"], project["dependencies"]]
    lists += [extras[name] for name in sorted(extras.keys() - FOR_DEVELOPERS)]
    for requirement in itertools.chain.from_iterable(lists):
        found = REQUIREMENT.fullmatch(requirement)
        if found is None:
            raise ValueError(f"{requirement}: not of the form NAME>=VERSION")
        name, version, marker = found.groups(default="")
        yield f"{name}=={version}{marker}" if lowest else f"{name}{marker}"


if __name__ == "__main__":
    print("\n".join(requirements(lowest="--newest" not in sys.argv)))
