"""Prompts ranked by the lengths of their last responses, and workers allotted to them (RhymeRL §6)."""
