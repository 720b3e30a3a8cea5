"""The list of all dialects. A new engine is a new package and one line here."""

from __future__ import annotations

from sidestep.engines.dialect import Dialects
from sidestep.engines.llamacpp.dialect import DIALECT as LLAMACPP
from sidestep.engines.sglang.dialect import DIALECT as SGLANG
from sidestep.engines.streams.dialect import DIALECT as STREAMS
from sidestep.engines.triton.dialect import DIALECT as TRITON
from sidestep.engines.vllm.dialect import DIALECT as VLLM

DIALECTS = Dialects(
    VLLM,
    SGLANG,
    STREAMS,
    TRITON,
    LLAMACPP,
)
