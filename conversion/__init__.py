"""Proof that converted weights compute what their source computes, and conversion of whole releases."""
