"""Random programs: what they allocate by a trace and for real must be the same."""
