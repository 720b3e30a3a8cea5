"""Options of ``--subscribe``, and error lines for invalid ones."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.config.subscriptions import MAX_RANKS, Subscription, parse

KV = "kv-events=tcp://host:5557"


def test_a_subscription_has_options() -> None:
    """Each may be given once, in any order."""
    text = f"{KV}, replay=tcp://host:5558,topic=kv,model=m/7b,engine=3,label.pod=p-0,label.az=b=c"

    assert parse(text) == (
        Subscription(
            "kv-events",
            "tcp://host:5557",
            "tcp://host:5558",
            "kv",
            "m/7b",
            "3",
            0,
            (("az", "b=c"), ("pod", "p-0")),
        ),
    )
    assert parse("load=tcp://[::1]:1") == (Subscription("load", "tcp://[::1]:1"),)
    assert parse("forward-pass=ipc:///run/fpm") == (Subscription("forward-pass", "ipc:///run/fpm"),)


def test_a_range_is_one_subscription_per_rank() -> None:
    """Ports, or numbers at the end of a path, count up; the replay endpoint follows."""
    found = parse("kv-events=tcp://h:5557-5559,replay=tcp://h:6557-6559,model=m")

    assert [(one.endpoint, one.replay, one.rank) for one in found] == [
        ("tcp://h:5557", "tcp://h:6557", 0),
        ("tcp://h:5558", "tcp://h:6558", 1),
        ("tcp://h:5559", "tcp://h:6559", 2),
    ]
    paths = parse("forward-pass=ipc:///run/fpm.0-1")
    assert [one.endpoint for one in paths] == ["ipc:///run/fpm.0", "ipc:///run/fpm.1"]


WRONG = [
    ("", "must be KIND=ENDPOINT"),
    ("kv-events", "must be KIND=ENDPOINT"),
    ("kv=tcp://h:1", "one of kv-events, forward-pass, load"),
    ("load=", "is no endpoint"),
    ("load=h:1", "is no endpoint"),
    ("load=tcp://*:1", "is no endpoint"),
    ("load=tcp://h", "is no endpoint"),
    ("load=tcp://h:0", "a port is 1 to 65535"),
    ("load=tcp://h:65536", "a port is 1 to 65535"),
    ("load=tcp://h:65530-65540", "a port is 1 to 65535"),
    ("load=inproc://x", "is no endpoint"),
    ("load=tcp://h:9-8", "must rise"),
    (f"load=tcp://h:1-{MAX_RANKS + 1}", "must rise"),
    (f"{KV},rank=1", "known are replay=, topic="),
    (f"{KV},", "is no option"),
    (f"{KV},model", "is no option"),
    (f"{KV},model=a,model=b", "model= is given twice"),
    (f"{KV},model=a\x07", "must be printable"),
    (f"{KV},model={'m' * 257}", "must be printable"),
    (f"{KV},label.9=a", "cannot be a label"),
    (f"{KV},label.engine=a", "use engine= and model="),
    (f"{KV},label.__a=a", "cannot be a label"),
    (f"{KV},replay=tcp://h:1-2", "as many ports as the endpoint, 1"),
    (f"{KV}-5558,replay=tcp://h:1", "as many ports as the endpoint, 2"),
    (f"{KV}-5558,engine=0", "a --subscribe of its own"),
    ("load=tcp://h:1,replay=tcp://h:2", "only kv-events"),
    (3, "must be a string"),
]


@pytest.mark.parametrize(("text", "complaint"), WRONG)
def test_an_invalid_subscription_has_an_error(text: object, complaint: str) -> None:
    """The text completes an error line."""
    with pytest.raises(ValueError, match=re.escape(complaint)):
        parse(text)


@given(st.text(max_size=60) | st.text(",=-.:/0129ab", max_size=40).map(lambda end: f"{KV}{end}"))
def test_any_text_is_subscriptions_or_an_error_line(text: str) -> None:
    """No other exception is raised."""
    try:
        found = parse(text)
    except ValueError:
        return
    assert 0 < len(found) <= MAX_RANKS
