"""Options of ``--scrape``, and error lines for invalid ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refused import refused
from sidestep.config.scrape_targets import MAX_TARGETS, Header, Target, parse
from sidestep.config.settings import read
from sidestep.errors import ConfigError

URL = "http://host:8002/metrics"
SAFE = "https://host/metrics"


def test_a_target_has_options() -> None:
    """Each may be given once, in any order."""
    text = (
        f"{SAFE},interval=0.5, timeout=7,label.pod=p-0,label.az=b=c,ca=/ca.pem,cert=/c.pem,"
        "key=/k.pem,keepalive=true,header.X-Key=a@b,header.Authorization=Bearer @/run/token,"
        "header.cookie=@/run/cookie"
    )

    assert parse(text) == Target(
        SAFE,
        0.5,
        7.0,
        (("az", "b=c"), ("pod", "p-0")),
        (
            Header("Authorization", "Bearer ", "/run/token"),
            Header("X-Key", "a@b"),
            Header("cookie", "", "/run/cookie"),
        ),
        "/ca.pem",
        "/c.pem",
        "/k.pem",
        keepalive=True,
    )


def test_nothing_but_the_url_is_needed() -> None:
    """The defaults are ``/metrics``, one second, a timeout of 60 seconds and no keepalive."""
    assert parse("http://HOST:8002") == Target("http://host:8002/metrics", 1.0, 60.0)
    assert parse("https://[::1]/a/B?c=d#e").url == "https://[::1]/a/B?c=d"
    assert parse(URL).keepalive is False


WRONG = [
    ("", "must be URL[,option=value...], with http:// or https://HOST[:PORT]"),
    ("host:8002", "must be URL"),
    ("ftp://host", "must be URL"),
    ("http://", "must be URL"),
    ("http://:80/metrics", "must be URL"),
    ("http://host:0", "must be URL"),
    ("http://host:65536", "must be URL"),
    ("http://host:a", "must be URL"),
    ("http://[::1", "must be URL"),
    ("http://ho st", "must be URL"),
    ("http://h\u00f6st", "must be URL"),
    ("http://host/\na", "must be URL"),
    (f"http://{'h' * 256}", "characters at most"),
    ("http://me:secret@host", "use header.Authorization=@/FILE"),
    (f"{URL},", "'' is no option"),
    (f"{URL},interval", "'interval' is no option; known are interval=, "),
    (f"{URL},every=1", "label.NAME= and header.NAME="),
    (f"{URL},interval=0.01", "interval= must be a number of seconds, 0.05 to 3600"),
    (f"{URL},timeout=3601", "timeout= must be a number of seconds"),
    (f"{URL},timeout=nan", "timeout= must be a number of seconds"),
    (f"{URL},interval=a", "interval= must be a number of seconds"),
    (f"{URL},interval=1,interval=2", "interval= is given twice"),
    (f"{URL},keepalive=maybe", "keepalive= must be true or false"),
    (f"{URL},label.le=1", "'le' cannot be a label"),
    (f"{URL},label.__a=1", "'__a' cannot be a label"),
    (f"{URL},label.a=\x07", "label.a= must be printable"),
    (f"{URL},header.Host:=a", "'Host:' cannot be a header"),
    (f"{URL},header.Connection=close", "'Connection' cannot be a header"),
    (f"{URL},header.a=\u00e4", "header.a= must be ASCII"),
    (f"{URL},header.a=b\rc", "header.a= must be ASCII"),
    (f"{URL},header.a={'b' * 8193}", "8192 characters at most"),
    (f"{URL},header.a=@token", "header.a=@ must be followed by an absolute path"),
    (f"{URL},header.a=b,header.A=c", "header.a= is given twice"),
    (f"{URL},ca=/ca.pem", "need a URL that begins with https://"),
    (f"{SAFE},key=/k.pem", "key= needs cert="),
    (3, "must be a string"),
]


@pytest.mark.parametrize(("text", "complaint"), WRONG)
def test_an_invalid_target_has_an_error(text: object, complaint: str) -> None:
    """The text completes an error line."""
    with pytest.raises(ValueError, match=re.escape(complaint)):
        parse(text)


def test_flags_the_environment_and_the_file_agree(tmp_path: Path) -> None:
    """In the variable blanks separate targets, since options have commas."""
    file = tmp_path / "sidestep.toml"
    file.write_text(f'scrape = ["{URL},interval=5", "http://b"]\n')
    flags = read({"scrape": (f"{URL},interval=5", "http://b")}, {})

    assert flags.scrape == read({}, {"SIDESTEP_SCRAPE": f" {URL},interval=5\n http://b"}).scrape
    assert flags.scrape == read({"config_file": str(file)}, {}).scrape
    assert [one.name for one in flags.scrape] == [URL, "http://b/metrics"]
    assert read({}, {}).scrape == ()


def test_targets_are_distinct_and_few() -> None:
    """A URL may occur once; its host ignores case."""
    with pytest.raises(ConfigError, match=f"^scrape: {URL} is given twice"):
        read({"scrape": (URL, f"{URL.replace('host', 'HOST')},interval=2")}, {})
    with pytest.raises(ConfigError, match="no more than 64 targets"):
        read({"scrape": tuple(f"http://{n}" for n in range(MAX_TARGETS + 1))}, {})


@pytest.mark.parametrize(
    "text",
    [
        f"{URL},header.Authorization=Bearer s3cret,every=1",
        f"{URL},header.a=s3cret,header.a=s3cret",
        "http://me:s3cret@host/metrics",
        f"{URL},heder.Authorization=s3cret",
        f"{URL}?token=s3cret&s3cret,every=1",
        f"{URL}?s3cret,label.a=b,label.a=b",
    ],
)
def test_no_error_line_has_a_secret(text: str) -> None:
    """Valid headers, passwords and queries in URLs, and values of misspelled options are masked."""
    assert refused({"scrape": (text,)}).startswith("--scrape 'http://")


def test_two_targets_that_differ_in_the_query_have_one_name() -> None:
    """A query may be a secret, so the name has none of it; a URL that occurs twice is still an error."""
    found = read({"scrape": (f"{URL}?token=s3cret", f"{URL}?token=other")}, {})

    assert [one.name for one in found.scrape] == [f"{URL}?***"] * 2
    assert [one.url for one in found.scrape] == [f"{URL}?token=s3cret", f"{URL}?token=other"]
    twice = refused({"scrape": (f"{URL}?token=s3cret",) * 2})
    assert twice.startswith(f"scrape: {URL}?*** is given twice")


@given(st.text(max_size=60) | st.text(",=-.:/@0129ab", max_size=40).map(lambda end: URL + end))
def test_any_text_is_a_target_or_an_error_line(text: str) -> None:
    """No other exception is raised."""
    try:
        found = parse(text)
    except ValueError:
        return
    assert parse(found.url).url == found.url
