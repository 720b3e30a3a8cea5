"""A process that serves a page with a count of its requests; it prints its URL."""

from __future__ import annotations

import itertools
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

READS = "reads_total"
"""Counter of requests: each scrape stores a value one higher than before."""
_numbers = itertools.count(1)


class Page(BaseHTTPRequestHandler):
    """A handler that answers every path with the page."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer with a count that is one higher than before."""
        body = f"# TYPE {READS} counter\n{READS} {next(_numbers)}\n".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Write nothing."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    sys.stdout.write("http://{}:{}/metrics\n".format(*server.server_address))
    sys.stdout.flush()
    server.serve_forever()
