"""A page that counts who has read it, as a process: it prints its address, and serves until it is stopped."""

from __future__ import annotations

import itertools
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

READS = "reads_total"
"""Each scrape stores a number that is one higher."""
_numbers = itertools.count(1)


class Page(BaseHTTPRequestHandler):
    """Any path is the page."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Count it, and say the count."""
        body = f"# TYPE {READS} counter\n{READS} {next(_numbers)}\n".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    sys.stdout.write("http://{}:{}/metrics\n".format(*server.server_address))
    sys.stdout.flush()
    server.serve_forever()
