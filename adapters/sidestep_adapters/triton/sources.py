"""The sources of ``--triton``: one poller for each server."""

from __future__ import annotations

from collections.abc import Sequence

from sidestep.config.settings import Config
from sidestep.config.triton_servers import Server
from sidestep.errors import ConfigError, WireError
from sidestep.ingest.intake import Intake
from sidestep.ingest.local_stream import ServerFeed
from sidestep_adapters.triton.http import TritonApi
from sidestep_adapters.triton.models import server_engine
from sidestep_adapters.triton.poller import TritonPoller


def sources(config: Config, intake: Intake, _: object) -> Sequence[TritonPoller]:
    """Return one poller for each ``--triton``.

    Raises:
        ConfigError: The labels of a server are invalid, or a file that it needs cannot be read.
    """
    # A family cannot come from both a page and statistics, which have other labels.
    has_failures = not any(server.metrics for server in config.triton)
    return [_source(server, intake, has_failures=has_failures) for server in config.triton]


def _source(server: Server, intake: Intake, *, has_failures: bool) -> TritonPoller:
    name = server.target.name
    try:
        intake.registry.check(server_engine(name, dict(server.target.labels)))
        api = TritonApi(server.target)
        api.check()
    except (ConfigError, WireError) as error:
        raise ConfigError(f"--triton {name}: {error}") from None
    feed = ServerFeed(intake, f"triton {name}")
    return TritonPoller(server, api, feed, has_failures=has_failures)
