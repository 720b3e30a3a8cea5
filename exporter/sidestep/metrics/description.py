"""The description of an engine, which its processes send."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sidestep.catalog.buckets import Bounds
from sidestep.protocol.messages import MISSING, MISSING_FIELDS


@dataclasses.dataclass(slots=True)
class Description:
    """An engine as its processes describe it; the next Hello replaces the description as a whole.

    Attributes:
        core_info: Info metrics by short name, as the engine core last sent them.
        front_info: Info metrics as a front end last sent them.
        features: Options that the engine has.
        closed: All values that a label can have, by label name, as the Hello lists them.
        sent_bounds: Bucket bounds that the engine sent, by bucket family.
        bounds: Bucket bounds in use, by bucket family.
        encoded_head: The encoded head of the engine's totals; empty until it is needed.
        excess_bytes: Bytes by which the engine's page may exceed an ordinary engine's; see
            ``description_limits``.
    """

    core_info: Mapping[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    front_info: Mapping[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    features: frozenset[str] = frozenset()
    closed: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
    sent_bounds: Mapping[str, list[float]] = dataclasses.field(default_factory=dict)
    bounds: Mapping[str, Bounds] = dataclasses.field(default_factory=dict)
    encoded_head: bytes = b""
    excess_bytes: int = 0

    @property
    def missing_fields(self) -> dict[str, str]:
        """Paths of fields that the engine's release lacks, with ``MISSING`` or ``ABSENT``."""
        return {
            name.replace("__", "."): status
            for info in (self.core_info, self.front_info)
            for name, status in info.get(MISSING_FIELDS, {}).items()
        }

    @property
    def renamed_fields(self) -> list[str]:
        """The missing fields that the engine's release should have."""
        return [path for path, status in self.missing_fields.items() if status == MISSING]
