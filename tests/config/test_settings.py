"""Settings from flags, environment variables and the file, and one-line errors for invalid ones."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from exporters import Start
from sidestep.app.cli import serve
from sidestep.catalog.buckets import DEFAULTS
from sidestep.config.settings import SETTINGS, Config, read
from sidestep.errors import ConfigError
from sidestep.protocol.limits import MAX_BOUNDS
from sidestep.tracking.health.step_times import Thresholds
from socket_peers import connect


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("web.listen-address", "nonsense", "must be host:port"),
        ("web.listen-address", "127.0.0.1:99999", "must be host:port"),
        ("ingest.endpoint", "tcp://a..b:1", "'a..b' is no name or address of a host"),
        ("ingest.endpoint", f"tcp://{'x' * 64}:1", f"'{'x' * 64}' is no name or address"),
        ("subscribe", "load=tcp://a..b:1", "'a..b' is no name or address of a host"),
        ("scrape", "http://a..b/metrics", "'a..b' is no name"),
        ("triton", "http://a..b:8000", "'a..b' is no name"),
        ("engine", "llamacpp=http://a..b:8080", "'a..b' is no name"),
        ("web.telemetry-path", "metrics", "must begin with /"),
        ("web.telemetry-path", "/", "must be a path of its own"),
        ("web.telemetry-path", "/-/healthy", "must be a path of its own"),
        ("web.telemetry-path", "/{", "must be a path of its own"),
        ("web.dashboard-url", "javascript:alert(1)", "must be an http or https address"),
        ("log.level", "loud", "must be one of debug, info, warning, error"),
        ("log.stats-interval", "-1", "must be a number of seconds"),
        ("kv.sample-rate", "1.5", "must be a number, 0 to 1"),
        ("kv.sample-rate", "nan", "must be a number, 0 to 1"),
        ("kv.max-tracked", "0", "must be a whole number, 1 or above"),
        ("kv.max-tracked", "9" * 20, "must be 1099511627776 at most"),
        ("requests.max-tracked", "9" * 5000, "must be 1099511627776 at most"),
        ("requests.max-tracked", "1.5", "must be a whole number, 1 or above"),
        ("requests.max-age", "0", "must be a number of seconds above 0"),
        ("health.min-threshold", "2.9", "must be a number of seconds, 3 to 86400"),
        ("health.min-threshold", "nan", "must be a number of seconds, 3 to 86400"),
        ("health.max-threshold", "0", "must be a number of seconds above 0"),
        ("intervals.scheduled", "middle", "must be one of first, last"),
        ("intervals.inter-token", "both", "must be one of output, token"),
        ("limits.memory-hard", "-1", "must be a whole number"),
    ],
)
def test_an_invalid_value_is_an_error(flag: str, value: str, message: str) -> None:
    """The line has the flag or the variable, the value, and the valid ones."""
    (setting,) = (setting for setting in SETTINGS if setting.flag == flag)
    given = (value,) if setting.repeatable else value

    with pytest.raises(ConfigError, match=f"^--{flag} '{re.escape(value)}': {re.escape(message)}"):
        read({setting.key: given}, {})
    with pytest.raises(ConfigError, match=f"^{setting.variable} '{re.escape(value)}': "):
        read({}, {setting.variable: value})


FILES = {
    "not TOML": ("= 1", "is not TOML"),
    "unknown key": ("[web]\nlisten = 'x'", "web.listen is not a setting"),
    "unknown section": ("speed = 9", "speed is not a setting; see sidestep serve --help"),
    "misspelt key": ("log.levle = 'x'", "not a setting; did you mean log.level?"),
    "wrong type": ("[web]\ntelemetry-path = 5", "must be a string"),
    "NUL in a path": ('[state]\ndir = "\\u0000"', "must be a string without NUL"),
    "wrong value": ("[log]\nlevel = 'loud'", "must be one of"),
    "boolean for a number": ("[kv]\nmax-tracked = true", "must be a whole number, 1 or above"),
    "boolean for a share": ("[kv]\nsample-rate = false", "must be a number, 0 to 1"),
    "deep nesting": ("x = " + "[" * 5000, "is not TOML"),
    "long number": ("x = " + "9" * 5000, "is not TOML"),
    "no address": ("[web]\nlisten-address = []", "give at least one"),
    "unknown buckets": ("[buckets]\nx = [1]", "buckets.x is unknown"),
    "decreasing buckets": ("[buckets]\nrequest_latency = [2, 1]", "must increase strictly"),
    "huge bucket": (f"[buckets]\nrequest_latency = [{10**400}]", "or more finite numbers"),
    "unknown schema": ("[schemas]\nx = 3", "schemas.x is unknown"),
    "too fine": ("[schemas]\nrequest_latency = 9", "give a whole number from -4 to 8"),
    "no number": ("[schemas]\nrequest_latency = true", "give a whole number"),
    "no table": ("schemas = 3", "schemas must be a table"),
    "unknown histograms": ('histograms = "new"', "histograms"),
    "no bounds shown": ("[shown_buckets]\nx = []", "sidestep.toml: shown_buckets.x: give one or"),
    "no buckets": ("[buckets]\nrequest_latency = []", "give one or more finite numbers"),
}


@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES.keys())
def test_an_invalid_file_is_an_error(content: str, message: str, tmp_path: Path) -> None:
    """The error names the key and the valid values."""
    with pytest.raises(ConfigError, match=message):
        read_file(tmp_path, content)


def read_file(directory: Path, content: str, **environ: str) -> Config:
    """Return the settings of a file with ``content``."""
    file = directory / "sidestep.toml"
    file.write_text(content)
    return read({"config_file": str(file)}, environ)


def test_a_flag_wins_over_a_variable_over_the_file(tmp_path: Path) -> None:
    """A setting that is given nowhere has its default."""
    file = tmp_path / "sidestep.toml"
    file.write_text("[log]\nlevel = 'debug'\nformat = 'json'\nstats-interval = 5\n")
    environ = {"SIDESTEP_LOG_LEVEL": "warning", "SIDESTEP_LOG_FORMAT": "text"}
    config = read({"config_file": str(file), "log_level": "error"}, environ)

    assert (config.log_level, config.log_format) == ("error", "text")
    assert config.log_stats_interval == 5.0
    assert config.web_telemetry_path == "/metrics"
    assert config.web_listen_address == (("127.0.0.1", 9857),)


def test_the_thresholds_of_stalled_engines_are_in_order() -> None:
    """The defaults are those of the state machine; an error names both."""
    config = read({}, {})
    defaults = Thresholds()
    assert (config.health_min_threshold, config.health_max_threshold) == (
        defaults.least,
        defaults.most,
    )

    config = read({"health_min_threshold": "3"}, {"SIDESTEP_HEALTH_MAX_THRESHOLD": "3"})
    assert (config.health_min_threshold, config.health_max_threshold) == (3.0, 3.0)
    with pytest.raises(
        ConfigError, match=r"^--health.min-threshold 5: must not exceed --health.max-threshold 3$"
    ):
        read({"health_max_threshold": "3"}, {})


def test_no_more_tenants_than_may_be_shown() -> None:
    """A snapshot would not hold the counters of more."""
    names = [str(number) for number in range(121)]
    assert len(read({"tenants_show": names[1:]}, {}).tenants_show) == 120
    with pytest.raises(ConfigError, match=r"^--tenants\.show: give 120 tenants at most"):
        read({"tenants_show": names}, {})


def test_the_web_configuration_is_a_dotted_key_or_a_table(tmp_path: Path) -> None:
    """``web.config.file`` has two dots."""
    for text in ('[web]\nconfig.file = "x.yml"\n', '[web.config]\nfile = "x.yml"\n'):
        assert read_file(tmp_path, text).web_config_file == "x.yml"
    assert read({}, {"SIDESTEP_WEB_CONFIG_FILE": "y.yml"}).web_config_file == "y.yml"


def test_only_adjustable_settings_change_while_running() -> None:
    """Other changed settings keep their value and are listed again at every reload."""
    old = read({}, {})
    flags = {"kv_sample_rate": "0.5", "log_format": "json", "metrics_legacy": True}
    new = dataclasses.replace(read(flags, {}), buckets={"request_latency": (1.0,)})
    now, applied, pending = old.adjusted(new)

    assert applied == ["kv.sample-rate 0.5"]
    assert pending == ["metrics.legacy", "log.format", "buckets"]
    assert now == dataclasses.replace(old, kv_sample_rate=0.5)
    assert now.adjusted(new) == (now, [], pending)


def test_an_absent_switch_does_not_override_variable_or_file(tmp_path: Path) -> None:
    """The command line passes no value for it, rather than false."""
    file = tmp_path / "sidestep.toml"
    file.write_text("[metrics]\nlegacy = true\n[kv]\nscale-samples = true\n")

    def settings(*arguments: str, **environ: str) -> tuple[bool, bool]:
        config = read(serve.make_context("serve", list(arguments)).params, environ)
        return config.metrics_legacy, config.kv_scale_samples

    assert settings() == (False, False)
    assert settings("--config.file", str(file)) == (True, True)
    assert settings(SIDESTEP_METRICS_LEGACY="true") == (True, False)
    assert settings("--kv.scale-samples", SIDESTEP_KV_SCALE_SAMPLES="false") == (False, True)


@pytest.mark.parametrize(("count", "fits"), [(50, True), (255, False), (400, False)])
async def test_bounds_that_no_engine_would_accept_are_refused_at_start(
    count: int, fits: bool, start: Start, tmp_path: Path
) -> None:
    """The answer to each Hello has them, and an engine accepts one of 64 KiB."""
    families = list(DEFAULTS) if count < MAX_BOUNDS else list(DEFAULTS)[:1]
    lines = (f"{family} = {list(map(float, range(count)))}" for family in families)
    file = tmp_path / "sidestep.toml"
    file.write_text("[buckets]\n" + "\n".join(lines))
    if not fits:
        with pytest.raises(ConfigError, match=r"bounds of \[buckets\]"):
            async with start(config_file=str(file)):
                pass
        return
    async with start(config_file=str(file)) as exporter, connect(exporter) as peer:
        answer = await peer.send_hello()
        assert answer.settings is not None
        assert set(answer.settings.buckets) == set(families)
