"""Where SGLang loads no plugins: its collectors are tapped when their module is imported.

That is in releases before 0.5.11, and in processes of later ones that take requests for
several tokenizers. ``sidestep.pth`` installs it at the start of every interpreter of the
environment, if ``SIDESTEP_SGLANG_IMPORT_HOOK=1``; so nothing is imported here that costs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

COLLECTORS = ("sglang.srt.observability.metrics_collector", "sglang.srt.metrics.collector")
"""Where SGLang has them, and where it had them until 0.5.4."""


class Finder:
    """Finds what all others find, and has the collectors' module looked at once it has run."""

    def __init__(self, after: Callable[[ModuleType], None]) -> None:
        self._after = after

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> Any:
        """See ``importlib.abc.MetaPathFinder``."""
        if name not in COLLECTORS:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                self._watch(spec.loader)
                return spec
        return None

    def _watch(self, loader: Any) -> None:
        run = getattr(loader, "exec_module", None)
        if run is None:
            return

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._after(module)

        # A loader is made for each module; one that takes no attributes is left alone.
        with contextlib.suppress(AttributeError, TypeError):
            loader.exec_module = exec_module


def install() -> None:
    """Look at the collectors' module when it is imported, if it has not been."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(tap))


def tap(collectors: ModuleType) -> None:
    """Replace the classes in ``collectors``; whatever fails, SGLang goes on without us."""
    try:
        from sidestep_adapters.sglang import plugin as sglang_plugin  # noqa: PLC0415 - it imports much

        sglang_plugin.replace_in(collectors)
    except Exception:
        import logging  # noqa: PLC0415 - likewise

        logging.getLogger(__name__).exception("sidestep: SGLang's collectors could not be tapped")
