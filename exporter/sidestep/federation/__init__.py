"""Federation: records that downstream exporters send to an upstream exporter, per source and engine."""
