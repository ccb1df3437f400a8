"""Whole models, small enough to be measured on any machine: their training step both ways."""
