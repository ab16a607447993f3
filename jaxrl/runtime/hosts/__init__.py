"""Several hosts: the world of processes, what they agree on and send each other, and how they end."""
