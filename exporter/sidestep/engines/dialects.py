"""The list of all dialects. A new engine is a new package and one line here."""

from __future__ import annotations

from collections.abc import Mapping

from sidestep.engines.dialect import Dialect
from sidestep.engines.sglang.dialect import DIALECT as SGLANG
from sidestep.engines.streams.dialect import DIALECT as STREAMS
from sidestep.engines.triton.dialect import DIALECT as TRITON
from sidestep.engines.vllm.dialect import DIALECT as VLLM

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect for dialect in (VLLM, SGLANG, STREAMS, TRITON)
}
"""Dialects by the name in an engine's Hello."""
