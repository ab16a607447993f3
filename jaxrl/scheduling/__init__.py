"""Scheduling decisions as pure code: standard library and numpy only; time arrives as a field of events."""
