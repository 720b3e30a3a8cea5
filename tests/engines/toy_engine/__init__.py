"""An engine as CONTRIBUTING.md describes it: the files that a new engine needs, at their shortest."""
