"""The book: documents, notebooks, results and interactive pages as one static site (`make book`)."""
