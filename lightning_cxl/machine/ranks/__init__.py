"""What each of several processes takes of a machine: CPUs, near memory, its share of every budget."""
