"""The log of requests and its outputs, from the configuration."""

from __future__ import annotations

import logging

from sidestep.config.settings import Config
from sidestep.errors import ConfigError
from sidestep.requests.conditions import parse
from sidestep.requests.log_file import LineSink, line_sink
from sidestep.requests.record_queue import MAX_PENDING, RecordQueue
from sidestep.requests.record_writer import RecordWriter, Write
from sidestep.requests.request_log import RequestLog
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics

log = logging.getLogger(__name__)

MIB = 1 << 20


def request_log(
    config: Config, metrics: SelfMetrics
) -> tuple[RequestLog | None, RecordWriter | None]:
    """Return the log of requests, and the writer of its file; None if there is none.

    Raises:
        ConfigError: The file cannot be opened, or the condition is malformed.
    """
    outputs = {
        "file": ("--requests.log", config.requests_log),
        "traces": ("--otlp.traces-endpoint", config.otlp_traces_endpoint),
        "logs": ("--otlp.logs-endpoint", config.otlp_logs_endpoint),
    }
    queues = {
        output: RecordQueue(output, flag, metrics)
        for output, (flag, destination) in outputs.items()
        if destination
    }
    if not queues:
        return None, None
    try:
        condition = parse(config.requests_log_if) if config.requests_log_if else None
    except ValueError as error:
        raise ConfigError(f"--requests.log.if: {error}") from None
    writer = None
    if "file" in queues:
        size = config.requests_log_size * MIB
        lines = line_sink(config.requests_log, size, config.requests_log_files)
        writer = RecordWriter(queues["file"], writing(lines))
    log = RequestLog([*queues.values()], metrics, condition, config.requests_log_share)
    return log, writer


def writing(sink: LineSink) -> Write:
    """Return what writes records to a file, and logs its errors."""
    limited = RateLimitedLog(log)

    def write(batch: list[bytes]) -> bool:
        try:
            sink.write(b"".join(batch))
        except OSError as error:
            why = error.strerror or error
            limited.warning(
                "write",
                "cannot write --requests.log: %s; up to %d records wait",
                why,
                MAX_PENDING,
            )
            return False
        return True

    return write
