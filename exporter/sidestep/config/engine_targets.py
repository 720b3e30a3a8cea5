"""Parser of ``--engine``: the kind of a server that the exporter polls, its URL and options.

``sidestep_adapters.polling.poller`` finds the kinds and checks their own options.
"""

from __future__ import annotations

import dataclasses
import re
from urllib.parse import urlsplit

from sidestep.config import options, parsing, scrape_targets
from sidestep.config.scrape_targets import COMMON, HEADER, Target

FORM = "KIND=URL[,option=value...]"
SERVER = scrape_targets.Form(
    reserved=frozenset({"le", "quantile", "origin"}), usage=FORM.replace("URL", "http://HOST:PORT")
)

_KIND = re.compile(r"[a-z][a-z0-9]*")


@dataclasses.dataclass(frozen=True, slots=True)
class EngineTarget:
    """One server.

    Attributes:
        options: Options of this kind only, not checked yet.
    """

    kind: str
    target: Target
    options: tuple[tuple[str, str], ...] = ()

    def known(self, *names: str) -> dict[str, str]:
        """Return the options by name, after checking that each is one of ``names``."""
        return options.parse((f"{n}={text}" for n, text in self.options), (*names, *COMMON), {})


def parse(value: object) -> EngineTarget:
    """Return the server of one ``--engine``."""
    first, *rest = (part.strip() for part in parsing.text(value).split(","))
    kind, equals, url = first.partition("=")
    if not equals or not _KIND.fullmatch(kind):
        raise ValueError(f"must be {FORM}, such as llamacpp=http://127.0.0.1:8080")
    common, own = [url.rstrip("/")], []
    for part in rest:
        name, has_value, text = part.partition("=")
        is_common = name in COMMON or name.startswith((HEADER, options.LABEL))
        if is_common or not has_value:
            common.append(part)
        else:
            own.append((name, text))
    target, _ = scrape_targets.target(",".join(common), SERVER)
    if urlsplit(target.url).query:
        raise ValueError("the URL is that of the server, without a query")
    return EngineTarget(kind, target, tuple(own))
