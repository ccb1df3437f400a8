"""Values that are known or assumed beside the hollow storages."""
