"""The pollers that ``--triton`` asks for."""

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


def sources(config: Config, intake: Intake) -> Sequence[TritonSource]:
    """One for each server.

    Raises:
        ConfigError: One's labels cannot be shown, or a file that it needs cannot be read.
    """
    # One family cannot come from a page and from statistics, with other labels.
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
    """The one of ``server``; see ``Triton``.

    Raises:
        ConfigError: A file that it needs cannot be read, or gRPC's libraries are not there.
    """
    if server.is_grpc:
        # Of an extra that most do without.
        from sidestep_adapters.triton.grpc import GrpcServer  # noqa: PLC0415

        server_api = GrpcServer(server.target)
        server_api.check()
        return TritonSource(server, server_api, server_api, feed, reject, has_failures=has_failures)
    client = Client(server.target, IN_FLIGHT)
    client.check()
    api = HttpServer(client, server.target.url)
    return TritonSource(server, api, client, feed, reject, has_failures=has_failures)
