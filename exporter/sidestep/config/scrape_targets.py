"""Parser of ``--scrape``: URL, interval, credentials and labels of a polled target.

A flag with additional options has its own ``Form``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from sidestep.config import options, parsing
from sidestep.protocol.limits import MAX_LABEL_CHARS
from sidestep.transport.addresses import is_host

FORM = "URL[,option=value...]"
COMMON = ("interval", "timeout", "ca", "cert", "key", "keepalive")
HEADER = "header."
SCHEMES = ("http", "https")
INTERVAL, TIMEOUT = 1.0, 60.0
MIN_SECONDS, MAX_SECONDS = 0.05, 3600.0
MAX_TARGETS = 64
MAX_HEADER_CHARS = 8192

Value = TypeVar("Value")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
HEADER_TEXT = re.compile(r"[\x20-\x7e]*")
_FILE = re.compile(r"(|.* )@(.*)")
_OWN_HEADERS = ("connection", "content-length", "transfer-encoding", "accept-encoding")
_VALUES = re.compile(r"(,[^=,]*=)[^,]*")
_USER = re.compile(r"//[^/,]*@")
_QUERY = re.compile(r"\?[^,\s]*")


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """One header of a request.

    Attributes:
        text: Its value; with ``file``, the part before the content of the file.
        file: Absolute path, read at every poll; empty: none.
    """

    name: str
    text: str = dataclasses.field(repr=False)
    file: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A polled server, and how to poll it.

    Attributes:
        timeout: Seconds for a connection and a whole response.
        ca: File of the authorities to trust; empty for the system's.
        cert: File of the client's certificate; empty for none.
        key: File of its key; empty if ``cert`` has it too.
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
        """URL without its query, for labels and log lines."""
        return without_secrets(self.url)


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """The form of a flag's targets.

    Attributes:
        path: Path of a URL that has none.
        options: Names of options beside the common ones.
        reserved: Label names that a user cannot give.
        usage: What an error line says that the value must be.
        login: What an error line says to use instead of a password in the URL.
    """

    path: str = ""
    options: tuple[str, ...] = ()
    reserved: frozenset[str] = frozenset({"le", "quantile"})
    interval: float = INTERVAL
    usage: str = FORM
    login: str = "header.Authorization=@/FILE"


SCRAPE = Form(path="/metrics")


def parse(value: object) -> Target:
    """Return the target of one ``--scrape``."""
    return target(value, SCRAPE)[0]


def target(value: object, form: Form) -> tuple[Target, dict[str, str]]:
    """Return the target, and the values of ``form.options`` that were given.

    Raises:
        ValueError: Completes an error line; contains no secret.
    """
    first, *rest = (part.strip() for part in parsing.text(value).split(","))
    url = address(first, form)
    prefixes = {options.LABEL: options.label_check(form.reserved), HEADER: _check_header}
    given = options.parse(rest, (*form.options, *COMMON), prefixes)
    _check_files(url, given)
    found = Target(
        url,
        parsed("interval", given, form.interval, _seconds),
        parsed("timeout", given, TIMEOUT, _seconds),
        options.with_prefix(options.LABEL, given),
        tuple(_header(name, text) for name, text in options.with_prefix(HEADER, given)),
        given.get("ca", ""),
        given.get("cert", ""),
        given.get("key", ""),
        parsed("keepalive", given, default=False, parse=parsing.boolean),
    )
    options.check_unique(f"{HEADER}{header.name.lower()}=" for header in found.headers)
    return found, {name: text for name, text in given.items() if name in form.options}


def address(text: str, form: Form) -> str:
    """Return ``text`` as a URL to poll."""
    complaint = f"must be {form.usage}, with http:// or https://HOST[:PORT]"
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(complaint)
    try:
        parts = urlsplit(text)
        has_place = bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ValueError(complaint) from None
    if "@" in parts.netloc:
        raise ValueError(f"must have no user or password in the URL; use {form.login}")
    if parts.scheme not in SCHEMES or not has_place:
        raise ValueError(complaint)
    if len(text) > MAX_LABEL_CHARS - len(form.path):
        raise ValueError(f"a URL has {MAX_LABEL_CHARS - len(form.path)} characters at most")
    if not is_host(parts.hostname or ""):
        raise ValueError(f"{parts.hostname!r} is no name or address of a host")
    whole = parts._replace(netloc=parts.netloc.lower(), path=parts.path or form.path, fragment="")
    return whole.geturl()


def collect(found: tuple[Target, ...]) -> tuple[Target, ...]:
    """Check all targets of a flag together."""
    if len(found) > MAX_TARGETS:
        raise ValueError(f"no more than {MAX_TARGETS} targets can be polled")
    try:
        options.check_unique(target.url for target in found)
    except ValueError as error:
        raise ValueError(without_secrets(error)) from None
    return found


def collect_servers(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """Check the targets of all servers of a flag together."""
    collect(tuple(server.target for server in found))
    return found


def without_secrets(value: object) -> str:
    """Mask passwords, queries and values of options: a misspelled option may be a header with a secret."""
    return _QUERY.sub("?***", _USER.sub("//***@", _VALUES.sub(r"\1***", str(value))))


def is_header_name(name: str) -> bool:
    """Return whether a request may have a header of this name."""
    return _HEADER_NAME.fullmatch(name) is not None and name.lower() not in _OWN_HEADERS


def _check_header(name: str, text: str) -> None:
    if not is_header_name(name):
        raise ValueError(f"{name!r} cannot be a header of a request")
    if len(text) > MAX_HEADER_CHARS or not HEADER_TEXT.fullmatch(text):
        raise ValueError(f"{HEADER}{name}= must be ASCII, {MAX_HEADER_CHARS} characters at most")
    file = _FILE.fullmatch(text)
    if file is not None and not file[2].startswith("/"):
        raise ValueError(f"{HEADER}{name}=@ must be followed by an absolute path")


def _header(name: str, text: str) -> Header:
    file = _FILE.fullmatch(text)
    return Header(name, text) if file is None else Header(name, file[1], file[2])


def _check_files(url: str, given: Mapping[str, str]) -> None:
    if "key" in given and "cert" not in given:
        raise ValueError("key= needs cert=")
    urls = (url, *given.values())
    if {"ca", "cert"} & set(given) and not any(each.startswith("https://") for each in urls):
        raise ValueError("ca=, cert= and key= need a URL that begins with https://")


def parsed(
    name: str, given: Mapping[str, str], default: Value, parse: Callable[[str], Value]
) -> Value:
    """Return the value of the option ``name``, or ``default`` where it is not given."""
    try:
        return parse(given[name]) if name in given else default
    except ValueError as error:
        raise ValueError(f"{name}= {error}") from None


def _seconds(text: str) -> float:
    return parsing.number(text, MIN_SECONDS, MAX_SECONDS, "a number of seconds")
