"""Pictures of a profile: a page for browsers, an SVG, and a line of characters."""
