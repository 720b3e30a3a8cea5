"""The state: engines, their series and histograms, and the codec of their records."""
