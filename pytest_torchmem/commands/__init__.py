"""Commands of `torchmem` about one profile."""
