"""Wire structs of the toy engine."""

from __future__ import annotations

import msgspec

from sidestep.protocol.limits import Count, Observations, Ratio, Seconds, Text
from sidestep.protocol.self_described import EngineIndex


class ToyStep(msgspec.Struct, array_like=True, gc=False, tag="toy"):
    """One step: the state after it, and counts since the previous step."""

    engine: EngineIndex
    stamp: Seconds
    running: Count = 0
    waiting: Count = 0
    kv_usage: Ratio = 0.0
    prompt_tokens: Count = 0
    generated_tokens: Count = 0
    first_token_seconds: Observations = []
    phase: Text = ""
