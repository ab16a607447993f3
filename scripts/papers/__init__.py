"""The papers' experiments on modelled devices: set-ups, runs, pages (for `scripts/reproduce_papers.py`)."""
