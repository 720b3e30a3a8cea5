"""Options of ``--triton``, and error lines for invalid ones."""

from __future__ import annotations

import pytest

from refused import refused
from sidestep.config.scrape_targets import Header, Target
from sidestep.config.triton_servers import MAX_MODELS, OWN_LABELS, ModelChoice, Server, parse
from sidestep_adapters.triton.rows import ROWS

URL = "http://host:8000"


def test_nothing_but_the_url_is_needed() -> None:
    """The defaults are a quarter of a second, all models and no page."""
    assert parse(URL) == parse(f"{URL}/") == Server(Target(URL, 0.25, 60.0))


def test_a_server_has_options() -> None:
    """Several models, patterns and versions may be given."""
    text = (
        f"{URL}/proxied/,interval=5,model=a,model=b-*,model=c/12,metrics=http://host:8002,label.pod=x,"
        "header.x-triton-key=@/run/key"
    )

    assert parse(text) == Server(
        Target(
            f"{URL}/proxied",
            5.0,
            labels=(("pod", "x"),),
            headers=(Header("x-triton-key", "", "/run/key"),),
        ),
        (ModelChoice("a"), ModelChoice("b-*"), ModelChoice("c", "12")),
        "http://host:8002/metrics",
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("host:8000", "must be URL"),
        ("ftp://host", "must be URL"),
        ("grpc://host:8001", "must be Triton's HTTP port, such as http://HOST:8000"),
        ("grpcs://host:8001", "must be Triton's HTTP port"),
        ("", "must be URL"),
        (f"{URL},model=", "model= must be printable"),
        (f"{URL},model=a\nb", "model= must be printable"),
        (f"{URL},model=/1", "model= must be printable"),
        (f"{URL},model=a/", "needs a whole number"),
        (f"{URL},model=a/01", "needs a whole number"),
        (f"{URL},model=a/1/2", "needs a whole number"),
        (f"{URL},model=a/latest", "needs a whole number"),
        (URL + ",model=a" * (MAX_MODELS + 1), "no more than 256 models"),
        (f"{URL},metrics=host:8002", "must be URL"),
        (f"{URL},metrics=http://a:1,metrics=http://b:1", "given twice"),
        (f"{URL},label.model=a", "'model' cannot be a label"),
        (f"{URL},label.stage=a", "'stage' cannot be a label"),
        (f"{URL},label.origin=a", "'origin' cannot be a label"),
        (f"{URL},modle=a", "'modle' is no option; known are model="),
        (f"{URL},interval=0", "interval= must be a number"),
        (f"{URL}?token=s3cret", "a URL of Triton's API has no query"),
    ],
)
def test_a_mistake_is_one_line(text: str, complaint: str) -> None:
    """The error names the flag and the mistake, and contains no secret."""
    line = refused({"triton": (f"{text},header.x-key=s3cret" if text else text,)})

    assert line.startswith("--triton ")
    assert complaint in line
    assert "s3cret" not in line


def test_labels_of_its_families_cannot_be_given() -> None:
    """The settings cannot import the rows, so this test compares their list of labels."""
    assert {label for row in ROWS for label in row.labels} == OWN_LABELS
