"""Several hosts: the world of processes, what they agree on and tell each other, and how they end."""
