"""Child processes: starting, supervising and ending them, and the messages to and from them."""
