"""Several hosts: one process on each, what they say to each other, and what becomes of all when one fails."""
