"""What is wrapped in vLLM, each after a check of its signature."""
