"""Several hosts: the world of processes, what they agree on, and what goes between them."""
