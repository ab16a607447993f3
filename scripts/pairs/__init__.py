"""Drawn pairs of an answer and a reference, and the truth about them (for `scripts/check_math.py`)."""
