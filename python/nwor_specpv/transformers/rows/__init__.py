"""How many rows a verification step has."""
