"""Hostile bytes for whatever reads bytes: `make fuzz` at length, test_smoke.py a little of it."""
