"""bloomgated: the daemon that hosts named Bloom filters."""
