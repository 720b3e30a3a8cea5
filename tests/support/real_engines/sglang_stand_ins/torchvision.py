"""A stand-in for torchvision, whose wheel on PyPI cannot be imported beside a CPU build of torch.

SGLang and transformers import it; models of text do not use it.
"""

from __future__ import annotations

import sys

from stand_in import stand_in

__version__ = "0.0.0"

stand_in(sys.modules[__name__])
