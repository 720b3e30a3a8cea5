"""Pages of other exporters, merged into this one's."""
