"""Every operator and module that torch has sample inputs for, traced against the real CPU."""
