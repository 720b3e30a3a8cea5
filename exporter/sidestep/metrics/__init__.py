"""The state: engines, their series and histograms, limits, and the codec of totals."""
