"""The files of a release: ``make dist`` builds them into dist/."""
