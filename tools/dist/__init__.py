"""What a release consists of: ``make dist`` builds it into dist/."""
