"""What is on disk: the journal, the snapshots, and how both become filters again."""
