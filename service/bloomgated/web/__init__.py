"""The HTTP edge, on a port of its own."""
