"""Drafts from a prompt's responses of the epochs before (RhymeRL §5)."""
