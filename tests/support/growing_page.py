"""A server of a metrics page whose counters and histograms grow with each request."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SAMPLE = re.compile(r"([\w:]+)((?:\{.*\})?) (\S+)")
SUFFIX = re.compile(r"_(bucket|sum|count)$")


def grown(page: str, steps: int) -> str:
    """Return the page after so many observations of each histogram, and steps of each counter."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)", page, re.MULTILINE))
    lines = []
    for line in page.splitlines():
        found = SAMPLE.fullmatch(line)
        family = SUFFIX.sub("", found[1]) if found else ""
        if found and (
            kinds.get(found[1]) == "counter"
            or (family != found[1] and kinds.get(family) in ("histogram", "summary"))
        ):
            line = f"{found[1]}{found[2]} {float(found[3]) + steps}"  # noqa: PLW2901
        lines.append(line)
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def growing_page(page: str) -> Iterator[str]:
    """Serve the page; yield its URL."""
    steps = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = grown(page, next(steps)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
