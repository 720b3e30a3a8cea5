"""An aiohttp server that always answers with the same bytes: a lower bound of a page's cost."""

from __future__ import annotations

import os
import sys

from aiohttp import web

SIZE = 12 << 10


async def _page(_: web.Request) -> web.Response:
    return web.Response(body=BODY, headers={"Content-Encoding": "gzip"})


BODY = os.urandom(SIZE)


def main() -> None:
    """Serve where ``--web.listen-address`` says, at any path."""
    address = sys.argv[sys.argv.index("--web.listen-address") + 1]
    host, _, port = address.rpartition(":")
    app = web.Application()
    app.add_routes([web.get("/{path:.*}", _page)])
    web.run_app(app, host=host, port=int(port), print=None, access_log=None)


if __name__ == "__main__":
    main()
