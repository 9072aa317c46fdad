"""The journal, its files, and the way back from them."""
