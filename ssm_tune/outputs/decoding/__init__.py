"""Decoding on static states: many rows, one token each at a time, without anything that grows with what was read."""
