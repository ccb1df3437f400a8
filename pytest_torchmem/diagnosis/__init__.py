"""Why memory changed: what came and went at a peak, and the rules that name the cause."""
