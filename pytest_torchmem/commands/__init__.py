"""Commands of `torchmem` that trace, show a profile, or are about snapshot files."""
