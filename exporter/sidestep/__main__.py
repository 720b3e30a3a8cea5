"""``python -m sidestep``."""

from sidestep.cli import main

main()
