"""A model's modules once more, with the same weights, as a Generator runs them."""
