"""The runs behind the interactive pages, recorded as JSON files in `docs/data/` (`make record`)."""
