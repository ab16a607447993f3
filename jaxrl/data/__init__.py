"""Problems, prompts, the tokenizer, and where responses stop."""
