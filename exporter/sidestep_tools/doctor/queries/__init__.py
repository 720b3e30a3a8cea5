"""Checks of the PromQL queries of dashboards and rule files."""
