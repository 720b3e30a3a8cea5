"""What ``--scrape`` says: which page is fetched where, how often, and how one gets in.

What all polled targets have in common is read here. Flags with more than that (another scheme,
options of their own) are another ``Form``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from urllib.parse import urlsplit

from sidestep.config import key_values as options
from sidestep.config import parsing
from sidestep.protocol.limits import MAX_LABEL_CHARS

FORM = "URL[,option=value...]"
COMMON = ("interval", "timeout", "ca", "cert", "key", "keepalive")
HEADER = "header."
SECURE = ("https://", "grpcs://")
INTERVAL, TIMEOUT = 1.0, 60.0
MIN_SECONDS, MAX_SECONDS = 0.05, 3600.0
MAX_TARGETS = 64
MAX_HEADER_CHARS = 8192

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
HEADER_TEXT = re.compile(r"[\x20-\x7e]*")
_FILE = re.compile(r"(|.* )@(.*)")
_OWN_HEADERS = ("connection", "content-length", "transfer-encoding", "accept-encoding")
_VALUES = re.compile(r"(,[^=,]*=)[^,]*")
_USER = re.compile(r"//[^/,]*@")


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """One header of a request.

    Attributes:
        text: Its value, or what stands before the content of ``file``.
        file: Absolute path, read at every poll; empty: none.
    """

    name: str
    text: str = dataclasses.field(repr=False)
    file: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What is polled, and how.

    Attributes:
        interval: Seconds from one poll to the next.
        timeout: Seconds that a server may take for an answer once it is connected.
        labels: Of every sample that comes from there.
        ca: File of the authorities to trust; empty: the system's. Likewise ``cert`` and
            ``key``, the client's own.
        keepalive: Whether the connection stays open between polls.
    """

    url: str
    interval: float = INTERVAL
    timeout: float = TIMEOUT
    labels: tuple[tuple[str, str], ...] = ()
    headers: tuple[Header, ...] = ()
    ca: str = ""
    cert: str = ""
    key: str = ""
    keepalive: bool = False

    @property
    def name(self) -> str:
        """Identity that distinguishes it from others."""
        return self.url


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """What a flag's targets may be.

    Attributes:
        path: Of a URL that has none.
        options: Those beside what all have.
        reserved: Labels that a user cannot give.
    """

    schemes: tuple[str, ...] = ("http", "https")
    path: str = ""
    options: tuple[str, ...] = ()
    reserved: frozenset[str] = frozenset({"le", "quantile"})


SCRAPE = Form(path="/metrics")


def parse(value: object) -> Target:
    """The target of one ``--scrape``.

    Raises:
        ValueError: Completes an error line.
    """
    return target(value, SCRAPE)[0]


def target(value: object, form: Form) -> tuple[Target, dict[str, str]]:
    """The target, and the values of ``form.options`` that were given.

    Raises:
        ValueError: Completes an error line, which has no secret in it.
    """
    first, *rest = (part.strip() for part in parsing.text(value).split(","))
    url = address(first, form)
    prefixes = {options.LABEL: options.labels_but(form.reserved), HEADER: _check_header}
    given = options.read(rest, (*form.options, *COMMON), prefixes)
    _check_files(url, given)
    found = Target(
        url,
        _seconds("interval", given, INTERVAL),
        _seconds("timeout", given, TIMEOUT),
        options.behind(options.LABEL, given),
        tuple(_header(name, text) for name, text in options.behind(HEADER, given)),
        given.get("ca", ""),
        given.get("cert", ""),
        given.get("key", ""),
        _boolean("keepalive", given),
    )
    _check_twice(header.name.lower() for header in found.headers)
    return found, {name: text for name, text in given.items() if name in form.options}


def address(text: str, form: Form) -> str:
    """``text`` as a URL to ask.

    Raises:
        ValueError: It is none, or has a password in it; completes an error line.
    """
    complaint = f"must be {FORM}, with {' or '.join(f'{s}://' for s in form.schemes)}HOST[:PORT]"
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(complaint)
    try:
        parts = urlsplit(text)
        has_place = bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ValueError(complaint) from None
    if "@" in parts.netloc:
        raise ValueError(
            "must have no user or password in the URL; use header.Authorization=@/FILE"
        )
    if parts.scheme not in form.schemes or not has_place:
        raise ValueError(complaint)
    if len(text) > MAX_LABEL_CHARS - len(form.path):
        raise ValueError(f"a URL has {MAX_LABEL_CHARS - len(form.path)} characters at most")
    whole = parts._replace(netloc=parts.netloc.lower(), path=parts.path or form.path, fragment="")
    return whole.geturl()


def checked(found: tuple[Target, ...]) -> tuple[Target, ...]:
    """All targets of a flag.

    Raises:
        ValueError: There are too many, or one twice; completes an error line.
    """
    if len(found) > MAX_TARGETS:
        raise ValueError(f"no more than {MAX_TARGETS} targets can be polled")
    for one, other in pairwise(sorted(each.name for each in found)):
        if one == other:
            raise ValueError(f"{one} is given twice")
    return found


def without_secrets(value: object) -> str:
    """``value`` as an error line may show it: any option may be a header with a slip in it."""
    return _USER.sub("//***@", _VALUES.sub(r"\1***", str(value)))


def _check_header(name: str, text: str) -> None:
    if not _HEADER_NAME.fullmatch(name) or name.lower() in _OWN_HEADERS:
        raise ValueError(f"{name!r} cannot be a header of a request")
    if len(text) > MAX_HEADER_CHARS or not HEADER_TEXT.fullmatch(text):
        raise ValueError(f"{HEADER}{name}= must be ASCII, {MAX_HEADER_CHARS} characters at most")
    file = _FILE.fullmatch(text)
    if file is not None and not file[2].startswith("/"):
        raise ValueError(f"{HEADER}{name}=@ must be followed by an absolute path")


def _header(name: str, text: str) -> Header:
    file = _FILE.fullmatch(text)
    return Header(name, text) if file is None else Header(name, file[1], file[2])


def _check_twice(names: Iterable[str]) -> None:
    """Names of headers in small letters: no two."""
    for one, other in pairwise(sorted(names)):
        if one == other:
            raise ValueError(f"{HEADER}{one}= is given twice")


def _check_files(url: str, given: Mapping[str, str]) -> None:
    if "key" in given and "cert" not in given:
        raise ValueError("key= needs cert=")
    urls = (url, *given.values())
    if {"ca", "cert"} & set(given) and not any(each.startswith(SECURE) for each in urls):
        raise ValueError("ca=, cert= and key= need a URL that begins with https:// or grpcs://")


def _seconds(name: str, given: Mapping[str, str], default: float) -> float:
    if name not in given:
        return default
    try:
        found = float(given[name])
    except ValueError:
        found = -1.0
    if not MIN_SECONDS <= found <= MAX_SECONDS:
        raise ValueError(f"{name}= must be a number of seconds, {MIN_SECONDS:g} to {MAX_SECONDS:g}")
    return found


def _boolean(name: str, given: Mapping[str, str]) -> bool:
    try:
        return parsing.boolean(given.get(name, "false"))
    except ValueError as error:
        raise ValueError(f"{name}= {error}") from None
