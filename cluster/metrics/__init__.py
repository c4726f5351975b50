"""What the service measures: counted where it happens, added up in one actor, rendered for Prometheus."""
