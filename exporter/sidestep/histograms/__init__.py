"""Histograms: the classic and the native one, their bounds and their arithmetic."""
