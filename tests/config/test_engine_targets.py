"""Options of ``--engine``, and error lines for invalid ones."""

from __future__ import annotations

import re

import pytest

from refused import refused
from sidestep.config.engine_targets import EngineTarget, parse
from sidestep.config.scrape_targets import Header, Target

URL = "http://host:8080"


def test_a_server_has_a_kind_and_options() -> None:
    """Options of every kind are parsed; those of one kind are kept for it."""
    text = f"llamacpp={URL}/llm/,interval=5,model=a,label.pod=x,header.X-Api-Key=@/run/key"

    assert parse(f"llamacpp={URL}") == EngineTarget("llamacpp", Target(URL))
    assert parse(text) == EngineTarget(
        "llamacpp",
        Target(
            f"{URL}/llm",
            5.0,
            labels=(("pod", "x"),),
            headers=(Header("X-Api-Key", "", "/run/key"),),
        ),
        (("model", "a"),),
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (URL, "must be KIND=URL"),
        ("llamacpp", "must be KIND=URL"),
        (f"Llama-cpp={URL}", "must be KIND=URL"),
        ("llamacpp=host:8080", "must be KIND=http://HOST:PORT"),
        (f"llamacpp={URL}/metrics?model=a", "without a query"),
        (f"llamacpp={URL},interval=0", "interval= must be a number"),
        (f"llamacpp={URL},model", "'model' is no option"),
        (f"llamacpp={URL},label.le=a", "'le' cannot be a label"),
        ("llamacpp=http://user:s3cret@host", "must have no user or password in the URL"),
    ],
)
def test_invalid_options_are_one_line(text: str, complaint: str) -> None:
    """The line names the flag and shows no secret."""
    assert re.search(complaint, refused({"engine": (text,)}))
