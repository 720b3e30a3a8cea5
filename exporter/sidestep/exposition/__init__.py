"""From the registry to pages: families, filters, aggregation, formats, caches."""
