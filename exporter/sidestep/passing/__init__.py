"""Other exporters' pages, passed on."""
