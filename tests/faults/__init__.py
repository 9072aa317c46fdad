"""What breaks, and how it ends: real processes, real files, real faults."""
