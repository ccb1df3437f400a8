"""Random suites, signals, runs side by side and files that mean harm, against what must hold."""
