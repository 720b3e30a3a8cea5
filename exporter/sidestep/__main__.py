"""``python -m sidestep``."""

from sidestep.app.cli import main

main()
