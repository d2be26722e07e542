"""The runs behind the interactive pages, recorded as JSON files in `docs/data/` (`python -m book.recordings`)."""
