"""What one call of `generate` asks for, and what it gets: prompts, options, tokens, text."""
