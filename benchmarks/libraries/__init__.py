"""Training steps of the models of other libraries."""
