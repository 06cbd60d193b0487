"""Shards of a parameter: where they lie in the whole, and what their ranks agree on."""
