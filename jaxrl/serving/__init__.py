"""A model behind HTTP: OpenAI's routes, and tokens in, tokens out."""
