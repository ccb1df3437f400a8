"""Callbacks for the trainers of other libraries."""
