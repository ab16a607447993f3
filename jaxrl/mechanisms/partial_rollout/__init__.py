"""A round stops at enough complete prompts, and the next one goes on with the others (APRIL §2)."""
