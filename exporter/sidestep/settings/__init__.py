"""What the exporter is told to do, and how that is written."""
