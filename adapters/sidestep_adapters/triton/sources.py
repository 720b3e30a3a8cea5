"""The sources of ``--triton``: one poller for each server."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sidestep.config.settings import Config
from sidestep.config.triton_servers import Server
from sidestep.errors import ConfigError, WireError
from sidestep.ingest.intake import Intake
from sidestep.ingest.local_stream import ServerFeed
from sidestep_adapters.scrape.http_client import Client
from sidestep_adapters.triton.http import HttpServer
from sidestep_adapters.triton.models import server_engine
from sidestep_adapters.triton.poller import TritonSource
from sidestep_adapters.triton.queries import IN_FLIGHT


def sources(config: Config, intake: Intake, _: object) -> Sequence[TritonSource]:
    """Return one poller for each ``--triton``.

    Raises:
        ConfigError: The labels of a server are invalid, or a file it needs cannot be read.
    """
    # A family cannot come from both a page and statistics, which have other labels.
    has_failures = not any(server.metrics for server in config.triton)
    return [_checked_source(server, intake, has_failures=has_failures) for server in config.triton]


def _checked_source(server: Server, intake: Intake, *, has_failures: bool) -> TritonSource:
    try:
        intake.registry.check(server_engine(server.target.name, dict(server.target.labels)))
        feed = ServerFeed(intake, f"triton {server.target.name}")
        return make_source(server, feed, intake.reject, has_failures=has_failures)
    except (ConfigError, WireError) as error:
        raise ConfigError(f"--triton {server.target.name}: {error}") from None


def make_source(
    server: Server, feed: ServerFeed, reject: Callable[[str], None], *, has_failures: bool
) -> TritonSource:
    """Return the poller of ``server``; see ``TritonSource`` for the arguments.

    Raises:
        ConfigError: A file cannot be read, or the libraries for gRPC are not installed.
    """
    if server.is_grpc:
        # Imported here: it needs the extra ``grpc``.
        from sidestep_adapters.triton.grpc import GrpcServer  # noqa: PLC0415

        server_api = GrpcServer(server.target)
        server_api.check()
        return TritonSource(server, server_api, server_api, feed, reject, has_failures=has_failures)
    client = Client(server.target, IN_FLIGHT)
    client.check()
    api = HttpServer(client, server.target.url)
    return TritonSource(server, api, client, feed, reject, has_failures=has_failures)
