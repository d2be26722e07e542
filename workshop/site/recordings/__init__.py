"""The formulas of the page "Will it fit?", which `python -m workshop.site.recordings` writes into `docs/data/`."""
