"""Hostile input: coverage-guided fuzzing, floods, hostile peers, and the most expensive frames."""

import sys
from pathlib import Path

# Targets check for harm as the tests do.
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
