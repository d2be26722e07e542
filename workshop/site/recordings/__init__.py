"""The runs behind the interactive pages, recorded in `docs/data/*.json` by `python -m workshop.site.recordings`."""
