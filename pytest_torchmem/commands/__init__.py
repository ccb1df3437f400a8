"""Commands of `torchmem` that trace, or show a profile or what a snapshot has."""
