"""The daemon, from outside: its verbs, its errors, its metrics, its life."""
