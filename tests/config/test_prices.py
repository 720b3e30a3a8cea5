"""Settings ``--prices.*``, in flags, in the variable and in the file's table."""

from __future__ import annotations

from pathlib import Path

import pytest

from refused import refused
from sidestep.catalog.prices import Price
from sidestep.config.settings import Config, read
from sidestep.errors import ConfigError

LLAMA = Price("llama", 500_000, 50_000, 1_500_000)


def of_file(tmp_path: Path, text: str) -> Config:
    """Return the settings of a file."""
    file = tmp_path / "sidestep.toml"
    file.write_text(text)
    return read({"config_file": str(file)}, {})


def test_prices_of_flags_and_variable() -> None:
    """A cached token costs as much as a computed one, unless it has a price."""
    config = read({"prices_model": ("llama,input=0.5,cached=0.05,output=1.5",)}, {})
    assert config.prices_model == (LLAMA,)
    config = read(
        {}, {"SIDESTEP_PRICES_MODEL": "llama,input=.5,cached=0.05,output=1.5 *,input=1,output=2"}
    )
    assert config.prices_model == (LLAMA, Price("*", 1_000_000, 1_000_000, 2_000_000))
    assert read({}, {}).prices_model == ()


def test_prices_of_the_file(tmp_path: Path) -> None:
    """A table for each model, whose name may have any characters."""
    config = of_file(
        tmp_path,
        "[prices]\ngpu-hour = 2.5\n[prices.model.llama]\ninput = 0.5\ncached = 0.05\noutput = 1.5\n"
        '[prices.model."org/model.v1"]\ninput = 1\noutput = 0\n',
    )
    assert config.prices_gpu_hour == 2.5
    assert config.prices_model == (LLAMA, Price("org/model.v1", 1_000_000, 1_000_000, 0))
    assert of_file(tmp_path, "[prices.model]\n").prices_model == ()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("llama", "must be MODEL,input=PRICE"),
        ("llama,input=1", "must be MODEL,input=PRICE"),
        (",input=1,output=1", "must be MODEL,input=PRICE"),
        ("llama,input=1,output=1,training=1", "'training' is no option; known are input=, cached="),
        ("llama,input=-1,output=1", "must be a price from 0 to 1,000,000"),
        ("llama,input=nan,output=1", "must be a price from 0"),
        ("llama,input=1,output=1e-7", "with 6 decimals at most"),
        ("llama,input=free,output=1", "must be a price from 0"),
    ],
)
def test_invalid_flags(given: str, error: str) -> None:
    """One line names what is wrong."""
    line = refused({"prices_model": (given,)})
    assert line.startswith("--prices.model ")
    assert error in line


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[prices]\nmodel = 3\n", "must be a string"),
        ("[prices.model]\nllama = 3\n", "must be a table with input and output"),
        ("[prices.model.llama]\ninput = 1\nout = 1\n", "'out' is no price"),
        ("[prices.model.llama]\ninput = true\noutput = 1\n", "must be a price"),
        ("[prices.model.llama]\ninput = inf\noutput = 1\n", "must be a price"),
        ("[prices]\ngpu-hour = -1\n", "must be a price"),
        ("[prices]\ngpu = 1\n", "prices.gpu is not a setting"),
        ("prices = 1\n", "prices is not a setting"),
    ],
)
def test_invalid_files(tmp_path: Path, text: str, error: str) -> None:
    """One line names what is wrong."""
    with pytest.raises(ConfigError) as found:
        of_file(tmp_path, text)
    assert error in str(found.value)


def test_a_reload_names_the_prices() -> None:
    """They can change while the exporter runs."""
    config = read({"prices_model": ("llama,input=0.5,cached=0.05,output=1.5",)}, {})
    _, applied, pending = read({}, {}).adjusted(config)
    assert applied == ["prices.model llama,input=0.5,cached=0.05,output=1.5"]
    assert pending == []
