"""The command ``sidestep inject``: it adds the exporter and the plugin to the engines of manifests."""
