"""One file a foreign format: its table of rules, its numerics, how it is recognised."""
