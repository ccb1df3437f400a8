"""Pooling, padding, interpolation and sampling of images, and what rearranges their pixels."""
