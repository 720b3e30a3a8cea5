"""Health of engines, from the progress that their processes report."""
