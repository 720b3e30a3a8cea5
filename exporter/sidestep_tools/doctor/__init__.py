"""The command ``sidestep doctor``: checks of an installation from outside of its processes."""
