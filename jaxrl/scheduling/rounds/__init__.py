"""Round level: events in, commands out, and the rules that decide what a batch is made of."""
