"""The dashboards of ``grafana/``: one module each, over what they share."""
