"""One check: trace, compare, judge. Findings are data."""
