"""Generators of the dashboards in ``grafana/``, one module each."""
